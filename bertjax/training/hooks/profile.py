"""Profiles a few steps of a run with `jax.profiler`, for TensorBoard and xprof, see `config.profile`."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

import jax
from etils import epath

from bertjax.training.hooks.hook import Hook, TrainingRun

FOLDER = "profile"  # in the workdir


class Profile(Hook):
    """Records a trace of the steps that `config.profile` names as "START:STOP", both included.

    Each host writes `hostN.xplane.pb` and `hostN.trace.json.gz` to `WORKDIR/profile/plugins/profile/steps_START_STOP`,
    where TensorBoard looks for profiles. If training ends before step STOP, the files contain the steps until then.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Reads the steps from `config.profile`."""
        self._steps = range(0)  # the profiled steps of this process
        self._trace, self._annotation = contextlib.ExitStack(), contextlib.ExitStack()
        if not run.config.profile:
            return
        first, last = run.start_step + 1, run.total_steps
        start, stop = map(int, run.config.profile.split(":"))
        self._steps = range(max(start, first), min(stop, last) + 1)
        if not self._steps:
            run.print(f"config.profile = {run.config.profile!r}: no profile; this process runs steps {first} to {last}")

    def before_step(self, run: TrainingRun) -> None:
        """Starts the trace after the devices have finished the previous step, and annotates this step in the trace."""
        if run.step not in self._steps:
            return
        if run.step == self._steps[0]:
            jax.block_until_ready(run.state)
            name = f"steps_{self._steps[0]}_{self._steps[-1]}"
            self._trace.enter_context(_trace(run.workdir / FOLDER / "plugins" / "profile" / name))
        self._annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=run.step))

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Ends the annotation of this step. Ends the trace after the devices have finished the last profiled step."""
        del metrics
        if run.step not in self._steps:
            return
        if run.step == self._steps[-1]:
            jax.block_until_ready(run.state)
        self._annotation.close()
        if run.step == self._steps[-1]:
            self._trace.close()

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Ends the trace if training ends before the last profiled step."""
        self._annotation.close()
        self._trace.close()
        if self._steps and error is None:
            run.print(f"profile of steps {self._steps[0]} to {self._steps[-1]} in {run.workdir / FOLDER}")


@contextlib.contextmanager
def _trace(folder: epath.Path) -> Iterator[None]:
    """Context manager: writes a trace of the block to `folder`."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Tracing every Python call would slow the steps that are measured.
    with tempfile.TemporaryDirectory() as local:  # The workdir may be an object store.
        try:
            with jax.profiler.trace(local, profiler_options=options):
                yield
        finally:
            folder.mkdir(parents=True, exist_ok=True)
            for path in pathlib.Path(local).glob("plugins/profile/*/*"):
                kind = ".xplane.pb" if path.name.endswith(".xplane.pb") else ".trace.json.gz"
                (folder / f"host{jax.process_index()}{kind}").write_bytes(path.read_bytes())
