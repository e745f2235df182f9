"""A run from a config to its report: one sequence for pre-training, for fine-tuning, and for each run of a search."""

import dataclasses
from collections.abc import Callable

import jax
from etils import epath
from jax.sharding import Mesh

from bertjax.config import UserError
from bertjax.text.tokenizer import Tokenizer
from bertjax.training import checkpoint, workdir
from bertjax.training.loop import Trained, train
from bertjax.training.step import Program
from bertjax.training.task import Task
from bertjax.training.workdir import Difference, Record


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train.

    Args:
      config: with all that data and checkpoint decide filled in.
      record: what to write beside the checkpoints.
      initialize: params that replace the random ones of a new run; None: they stay random.
      notes: lines to print before it begins.
      report: (what `train` returned) -> the text that tells how it ended; all hosts call it, the first prints it.
    """

    config: object
    mesh: Mesh
    task: Task
    record: Record
    tokenizer: Tokenizer
    initialize: Callable[[dict], dict] | None
    notes: list[str]
    report: Callable[[Trained], str]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What pre-training and fine-tuning do each in their own way.

    Args:
      identity: (config) -> names of the fields that say which task it is.
      adopt: (config, record of an earlier run or None) sets what the beginning decides: the record of the run that goes
        on, otherwise `config.init_checkpoint`.
      total_steps: (config, record or None) -> steps of the whole run; None: not known before the data are read.
      open: (config, workdir, record or None) -> the run.
    """

    identity: Callable[[object], tuple[str, ...]]
    adopt: Callable[[object, Record | None], None]
    total_steps: Callable[[object, Record | None], int | None]
    open: Callable[[object, epath.Path, Record | None], Run]


def run(
    kind: Kind,
    config,
    folder: epath.Path,
    make_program: Callable[[Run], Program | None] = lambda run: None,
    is_trial: bool = False,
) -> Trained | None:
    """Trains what a validated config says in `folder`, from where an earlier run was stopped, and prints the report.

    Args:
      make_program: (run) -> its compiled program, where that of another run serves.
      is_trial: one of a search, which is not resumed once it has ended.

    Returns what `train` returned; None where the run had finished before.
    Raises `UserError` where the folder holds something else.
    """

    def say(*lines: str) -> None:
        if jax.process_index() == 0 and lines:
            print("\n".join(lines), flush=True)

    # Is there an earlier run, and is it the same?
    steps = checkpoint.steps(folder)
    before = workdir.require(folder) if steps else None
    if before is not None and before.config.task != config.task:
        workdir.refuse(folder, [Difference("task", before.config.task, config.task, is_fatal=True)])
    kind.adopt(config, before)
    changed = []
    if before is not None:
        changed = workdir.differences(before, Record(config), kind.identity(config))
        workdir.refuse(folder, changed)

        # Has it finished?
        total = kind.total_steps(config, before)
        if total is not None and steps[-1] > total:
            raise UserError(f"{folder} is at step {steps[-1]}, past the config's {total}; take another --workdir")
        if steps[-1] == total and (finished := workdir.read_report(folder)) is not None:
            say(f"finished before: {total} steps, in {folder}", finished)
            if changed:
                settings = "; ".join(map(str, changed))
                say(f"trained with other settings than these: {settings}. For a new run take another --workdir")
            return None

    # Data and model.
    opened = kind.open(config, folder, before)
    if before is not None:
        workdir.refuse(folder, workdir.differences(before, opened.record, kind.identity(config)))
    say(*opened.notes)
    if changed:
        say(f"going on with other settings than before: {'; '.join(map(str, changed))}")

    def begun(step: int) -> None:
        """Only what was restored, or is new, is written down."""
        if jax.process_index() == 0:
            workdir.write(folder, opened.record, opened.tokenizer)
        say(f"training in {folder}" + (f", from step {step} on" if step else ""))

    # Train, and report.
    trained = train(
        opened.task,
        opened.config,
        folder,
        opened.mesh,
        opened.initialize,
        make_program(opened),
        begun=begun,
        resumable_at_end=not is_trial,
    )
    text = opened.report(trained)
    if jax.process_index() == 0:
        workdir.write_report(folder, text)
    say(text)
    return trained
