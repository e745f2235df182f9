"""Profiles a few steps of a run with `jax.profiler`, for TensorBoard and xprof: `config.profile`."""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator

import jax
from etils import epath

FOLDER = "profile"  # in the workdir


@contextlib.contextmanager
def profiled(
    steps: range, setting: str, workdir: epath.PathLike, finish: Callable[[], None], say: Callable[[str], None]
) -> Iterator[Iterable[int]]:
    """Context manager: returns `steps` to iterate over, with a trace of those that `setting` names.

    Each host writes `hostN.xplane.pb` and `hostN.trace.json.gz` to `WORKDIR/profile/plugins/profile/steps_START_STOP`,
    where TensorBoard looks for them, also if the loop ends early.

    Args:
      steps: the steps of this process, counted from 1.
      setting: "START:STOP", both included; empty for none.
      finish: waits for the devices, so that the trace has whole steps.
      say: prints a line.
    """
    if not setting:
        yield steps
        return
    start, stop = map(int, setting.split(":"))
    wanted = range(max(start, steps.start), min(stop + 1, steps.stop))
    if not wanted:
        say(f"config.profile = {setting!r}: no profile, this process runs steps {steps.start} to {steps.stop - 1}")
        yield steps
        return
    folder = epath.Path(workdir) / FOLDER / "plugins" / "profile" / f"steps_{wanted[0]}_{wanted[-1]}"
    with contextlib.closing(_recorded(steps, wanted, folder, finish)) as recorded:
        yield recorded
    say(f"profile of steps {wanted[0]} to {wanted[-1]} in {epath.Path(workdir) / FOLDER}")


def _recorded(steps: range, wanted: range, folder: epath.Path, finish: Callable[[], None]) -> Iterator[int]:
    yield from range(steps.start, wanted.start)
    finish()
    with _trace(folder):
        for step in wanted:
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                yield step
                if step == wanted[-1]:
                    finish()
    yield from range(wanted.stop, steps.stop)


@contextlib.contextmanager
def _trace(folder: epath.Path) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every Python call would slow the steps that we measure
    with tempfile.TemporaryDirectory() as local:  # the workdir may be an object store
        try:
            with jax.profiler.trace(local, profiler_options=options):
                yield
        finally:
            folder.mkdir(parents=True, exist_ok=True)
            for path in pathlib.Path(local).glob("plugins/profile/*/*"):
                kind = ".xplane.pb" if path.name.endswith(".xplane.pb") else ".trace.json.gz"
                (folder / f"host{jax.process_index()}{kind}").write_bytes(path.read_bytes())
