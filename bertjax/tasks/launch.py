"""Launches a config on all hosts: pre-training, fine-tuning, or a search over fine-tuning runs."""

import contextlib
import shlex
from collections.abc import Iterator

import jax
from etils import epath

from bertjax import families, lock, objectives, tasks
from bertjax.config import UserError
from bertjax.interop import huggingface
from bertjax.reporting import page
from bertjax.sharding import hosts, liveness
from bertjax.sharding.mesh import use_cpu_cores
from bertjax.tasks import finetuning_run, pretraining_run, sweep
from bertjax.tasks.finetuning import SEPARATOR
from bertjax.training import checkpoint
from bertjax.training.run import Kind, run


def launch(config, workdir: epath.PathLike) -> None:
    """Trains a validated config in `workdir` and prints the report; a finished run only prints its report."""
    workdir, is_search = epath.Path(workdir), bool(config.get("sweep"))
    hosts.join(config.hosts_timeout)
    with liveness.ending_together():
        use_cpu_cores(config)  # before anything asks JAX for its devices
        hosts.check_shared(workdir)
        with hosts.on_first(lock.held(workdir, "--workdir")):
            if is_search:
                sweep.run(config, workdir)
                draw(workdir)
            else:
                sweep.refuse_search(workdir)
                if run(kind_of(config), config, workdir) is not None or not (workdir / page.PAGE).exists():
                    draw(workdir)
            if jax.process_index() == 0:
                print("\n".join(last_lines(config, workdir)), flush=True)
    hosts.leave()


def kind_of(config) -> Kind:
    return pretraining_run.KIND if config.task == tasks.PRETRAINING else finetuning_run.KIND


def draw(workdir: epath.Path) -> None:
    """Writes the page about a run, if that can be done: the run has ended well, whatever fails here."""
    if jax.process_index() == 0:
        try:
            page.write(workdir, [workdir])
        except Exception as error:
            print(f"{workdir / page.PAGE}: not drawn ({error})", flush=True)


def last_lines(config, workdir: epath.Path) -> list[str]:
    """Returns the names of the files that a finished run has written, and the next commands."""
    files = [workdir / page.PAGE]
    if config.get("sweep"):
        files.append(workdir / sweep.SUMMARY)
    else:
        best = checkpoint.best_step(workdir) if config.task != tasks.PRETRAINING else None
        files.append(workdir / checkpoint.FOLDER / str(best or checkpoint.steps(workdir)[-1]))
    names = " and ".join(str(file) for file in files if file.exists())
    commands = [shlex.join(["bertjax", *words]) for words in _next_commands(config, workdir)]
    return [f"the run is in {workdir}; see {names}", "next commands:", *(f"  {command}" for command in commands[:3])]


def _next_commands(config, workdir: epath.Path) -> Iterator[list[str]]:
    """Yields the words of commands that use the result of a run; capitals stand for files and texts of the user."""
    source = f"--checkpoint={workdir}"
    if config.task == tasks.PRETRAINING:
        if any(term.objective.fills_masks for term in objectives.of_stages(config)):
            yield ["predict", source, next(iter(config.eval.fill_masks), "a text with a [MASK] .")]
        elif families.words(config) == "next" and families.FAMILIES.get(config.model.family).new_cache is not None:
            yield ["predict", source, "--generate=50", "The"]
        yield from _conversion(config, workdir, "huggingface")
        yield ["train", "--config=classify", f"--config.init_checkpoint={workdir}", "--config.data.path=FOLDER"]
        return
    task = tasks.get(config.task)
    if task.vectors is not None:
        yield ["extract", source, "--input=TEXTS.txt", f"--output={workdir}/vectors.npy"]
        yield from _conversion(config, workdir, "sentence-transformers")
    else:
        yield ["predict", source, SEPARATOR.join(["TEXT"] * task.inputs.parts[0])]
        folder = epath.Path(config.data.path or workdir)
        if task.labelled and folder.is_dir() and (labelled := sorted(folder.glob("dev*"))):
            yield ["evaluate", source, f"--data={labelled[0]}"]
    yield ["serve", source]
    yield from _conversion(config, workdir, "huggingface")


def _conversion(config, workdir: epath.Path, form: str) -> Iterator[list[str]]:
    """Yields the command that converts a run, if transformers has a class for its model."""
    with contextlib.suppress(UserError):
        huggingface.check_form(families.config_of(config))
        output = f"{str(workdir).rstrip('/')}-{form}"
        yield ["convert", f"--source={workdir}", f"--output={output}", f"--format={form}"]
