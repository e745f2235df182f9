"""Fills the recurrent memory of a run that resumes from a checkpoint without one."""

import contextlib
import itertools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from bertjax.distributed.transfers import on_devices
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.state import TrainState
from bertjax.training.step import Program
from bertjax.training.task import Task


class RecurrentMemory(Hook):
    """Fills the recurrent memory before the first step, if the task has one and the state has not."""

    def on_start(self, run: TrainingRun) -> None:
        """Adds the memory to the state."""
        if run.task.recurrence and run.state.memory is None:
            run.state = fill_memory(run.task, run.program, run.state, run.mesh, run.step, run.print)


def fill_memory(
    task: Task, program: Program, state: TrainState, mesh: Mesh, step: int, say: Callable[[str], None]
) -> TrainState:
    """Returns the state of a step with a recurrent memory, which the params of the state compute.

    The model reads the batches of earlier steps again, up to the reach of the memory. The memory differs from the
    memory during training, which was computed with dropout and with the params of each step.

    Args:
      task: a task with a recurrent memory.
      program: the compiled functions of the task.
      state: the state of the step; its arrays are donated.
      mesh: the devices.
      step: the number of updates of the state.
      say: prints a line.
    """
    recurrence = task.recurrence
    assert recurrence is not None
    first = max(0, step - recurrence.reach)
    new = jax.jit(recurrence.new_memory, out_shardings=program.layout.state.memory)
    state = state.replace(memory=new())  # type: ignore[attr-defined]
    if first == step:
        return state
    say(f"the checkpoint has no memory of these rows: reads steps {first + 1:,} to {step:,} again to fill it")
    with contextlib.closing(on_devices(task.batches(first), mesh)) as batches:
        for number, batch in enumerate(itertools.islice(batches, step - first), first):
            state = program.update_memory(task.at(number)[0], state, batch)
    return state
