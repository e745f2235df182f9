"""The memory of rows that go on in the next step, where no checkpoint has it."""

import contextlib
import itertools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from bertjax.distributed.transfers import on_devices
from bertjax.training.state import TrainState
from bertjax.training.step import Program
from bertjax.training.task import Task


def warmed_up(
    task: Task, program: Program, state: TrainState, mesh: Mesh, step: int, say: Callable[[str], None]
) -> TrainState:
    """Returns a state of `step` with a memory: what its params make of the steps before, as far back as it reaches.

    In training each step has filled the memory with params of its own, and with dropout, so that this one differs.
    """
    first = max(0, step - task.recurrence.reach)
    new = jax.jit(task.recurrence.new_memory, out_shardings=program.layout.state.memory)
    state = state.replace(memory=new())
    if first == step:
        return state
    say(f"the checkpoint has no memory of these rows: reads steps {first + 1:,} to {step:,} again to fill it")
    with contextlib.closing(on_devices(task.batches(first), mesh)) as batches:
        for number, batch in enumerate(itertools.islice(batches, step - first), first):
            state = program.remember(task.at(number)[0], state, batch)
    return state
