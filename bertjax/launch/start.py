"""Launches a config on all hosts: pre-training, fine-tuning, or a sweep of fine-tuning runs."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.common import lock
from bertjax.distributed import hosts, liveness
from bertjax.distributed.mesh import use_cpu_cores
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning import sweep
from bertjax.inference import tasks
from bertjax.launch.budget import plan
from bertjax.pretraining import run as pretraining_run
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import HTML_REPORT
from bertjax.training.hooks.hook import Hook
from bertjax.training.run import RunKind, run_training


def launch(
    config: ConfigDict,
    workdir: epath.PathLike,
    began: float | None = None,
    draw: Callable[[epath.Path], None] = lambda workdir: None,
    hooks: Sequence[Hook] = (),
) -> None:
    """Trains a validated config in `workdir` and prints the report. A finished run only prints its report.

    Args:
      config: the validated config.
      workdir: the folder of the run.
      began: the start of the command, by `time.monotonic`; None: now.
      draw: writes the page about a finished run, such as `reporting.page.draw`. Raises nothing.
      hooks: hooks of the run, or of each trial of a sweep. They are called before the hooks of the config.
    """
    began = time.monotonic() if began is None else began
    workdir = epath.Path(workdir)
    hosts.join(config.hosts_timeout)
    with liveness.ending_together():
        use_cpu_cores(config)  # Must come before JAX lists its devices.
        hosts.check_shared(workdir)
        with hosts.on_first(lock.held(workdir, "--workdir")):
            if config.get("sweep"):
                sweep.run_sweep(config, workdir, hooks)
                draw(workdir)
            else:
                sweep.refuse_sweep(workdir)
                config = plan.begin(config, workdir, began)
                fit = functools.partial(plan.fit, workdir=workdir, began=began)
                trained = run_training(kind_of(config), config, workdir, fit, start_time=began, hooks=hooks)
                if trained is not None or not (workdir / HTML_REPORT).exists():
                    draw(workdir)
            if jax.process_index() == 0:
                print(_written_files(config, workdir), flush=True)
    hosts.leave()


def kind_of(config: ConfigDict) -> RunKind:
    """Returns the kind of run that trains the task of a config."""
    return pretraining_run.KIND if config.task == tasks.PRETRAINING else finetuning_run.KIND


def _written_files(config: ConfigDict, workdir: epath.Path) -> str:
    """Returns a line with the paths of the files that a finished run has written."""
    files = [workdir / HTML_REPORT]
    if config.get("sweep"):
        files.append(workdir / sweep.SUMMARY)
    else:
        best = checkpoint.best_step(workdir) if config.task != tasks.PRETRAINING else None
        files.append(workdir / checkpoint.FOLDER / str(best or checkpoint.steps(workdir)[-1]))
    return f"the run is in {workdir}; see {' and '.join(str(file) for file in files if file.exists())}"
