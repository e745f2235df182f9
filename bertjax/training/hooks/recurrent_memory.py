"""Computes the recurrent memory of a run that resumes from a checkpoint without recurrent memory."""

import contextlib
import functools
import itertools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from bertjax.distributed.transfers import copy_to_devices
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.state import TrainState
from bertjax.training.step import Program, gathered_params, loss_inputs, merge_groups, vmap_over_data
from bertjax.training.task import Loss, Task


class FillRecurrentMemory(Hook):
    """Sets the recurrent memory `state.carry` before the first step, if the task has a carry and the state has none."""

    def on_start(self, run: TrainingRun) -> None:
        """Computes the carry and adds it to the state."""
        if run.task.carry and run.state.carry is None:
            run.state = fill_recurrent_memory(run.task, run.program, run.state, run.mesh, run.step, run.print)


def fill_recurrent_memory(
    task: Task, program: Program, state: TrainState, mesh: Mesh, step: int, print_line: Callable[[str], None]
) -> TrainState:
    """Returns the state with a carry: the recurrent memory of the last `task.carry.reach` steps before `step`.

    Runs the model on the batches of these steps again, with the current params and without dropout. The carry of the
    original run differs, because it was computed with dropout and with the earlier params of each step.

    Args:
      task: a task with a carry.
      program: the compiled functions of the task.
      state: the state after `step` updates. The function donates the arrays of this state.
      mesh: the devices.
      step: the number of finished updates of the run.
      print_line: prints a line of text.
    """
    carry = task.carry
    assert carry is not None
    first = max(0, step - carry.reach)
    state = state.replace(carry=jax.jit(carry.init, out_shardings=program.layout.state.carry)())
    if first == step:
        return state
    print_line(
        f"no recurrent memory in the checkpoint: computing it from the batches of steps {first + 1:,} to {step:,}"
    )

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1, out_shardings=program.layout.state)
    def update_memory(loss: Loss, state: TrainState, batch: dict) -> TrainState:
        params = gathered_params(loss, state, program.layout, mesh)
        batch, _ = loss_inputs(loss, state, batch)
        updated = vmap_over_data(lambda params, part: loss(params, part, None)[1]["carry"], mesh, params, batch)
        return state.replace(carry=merge_groups(updated))

    with contextlib.closing(copy_to_devices(task.batches(first), mesh)) as batches:
        for number, batch in enumerate(itertools.islice(batches, step - first), first):
            state = update_memory(task.loss_and_config(number)[0], state, batch)
    return state
