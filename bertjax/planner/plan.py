"""Plans of a config for TPUs or GPUs without the hardware: compiles the train and evaluation steps."""

import copy
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.distributed.gpus import GIB, Machines
from bertjax.distributed.mesh import make_mesh
from bertjax.distributed.rules import RULES
from bertjax.distributed.topology import Accelerator
from bertjax.launch.start import kind_of
from bertjax.models import families
from bertjax.planner import hlo
from bertjax.planner.kernel_times import kernel_seconds
from bertjax.planner.roofline import Roofline, roofline
from bertjax.training.monitoring.memory import memory_saving_settings
from bertjax.training.step import Program, abstract_hyperparameters


class OutOfMemory(Exception):
    """The compiler ran out of HBM. `needed`: bytes per JAX device; None if the compiler does not report the bytes."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        amounts = re.search(r"Used ([\d.]+)([KMG]) of|temporaries \(([\d.]+)([KMG])\)", message)
        self.needed = None
        if amounts:
            number, unit = (part for part in amounts.groups() if part)
            self.needed = int(float(number) * {"K": 1 << 10, "M": 1 << 20, "G": GIB}[unit])


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The plan of one stage of a config on an accelerator. All memory sizes are bytes per chip."""

    stage: int
    name: str
    steps: int  # with the steps of smaller batches, in proportion to their size; 0: the number depends on the data
    chips: int
    batch_size: int
    rows: int  # rows of a batch; with packing fewer than sequences
    length: int
    params_bytes: int  # between steps
    optimizer_bytes: int
    memory_bytes: int  # the recurrent memory of the rows
    hbm_used_bytes: int | None  # maximum of train and evaluation step; None: out of memory, amount unknown
    hbm_available_bytes: int
    flops_per_step: int
    estimated_step_seconds: float | None  # on GPUs a lower bound, see `roofline`
    peak_flops: float  # peak FLOP/s of all chips together
    collectives: list[hlo.Collective]
    remat: str
    unroll: bool
    compile_seconds: float
    out_of_memory: str = ""  # the message of the compiler; empty if the stage compiled
    roofline: Roofline | None = None  # None on a TPU

    @property
    def activations_bytes(self) -> int:
        """The HBM of values that are not kept between steps: activations, gathered weights, gradients, the program."""
        assert self.hbm_used_bytes is not None  # the stage fits
        return self.hbm_used_bytes - self.params_bytes - self.optimizer_bytes - self.memory_bytes

    @property
    def missing_bytes(self) -> int | None:
        """The HBM that the stage needs in addition to the available HBM; negative if the stage fits; None: unknown."""
        return None if self.hbm_used_bytes is None else self.hbm_used_bytes - self.hbm_available_bytes

    @property
    def fits(self) -> bool:
        """Whether the stage fits in memory."""
        return not self.out_of_memory and self.missing_bytes is not None and self.missing_bytes <= 0

    @property
    def step_seconds(self) -> float:
        """The estimate of a stage that compiled."""
        assert self.estimated_step_seconds is not None
        return self.estimated_step_seconds

    @property
    def estimated_mfu(self) -> float | None:
        """The model FLOPs utilization; None if the stage did not compile."""
        if self.estimated_step_seconds is None:
            return None
        return self.flops_per_step / (self.estimated_step_seconds * self.peak_flops)


def plan(
    config: ConfigDict,
    accelerator: Accelerator | Machines,
    stages: list[int] | None = None,
    real_tokens_share: Sequence[float] = (),
) -> list[StagePlan]:
    """Compiles the train and evaluation steps of stages. Running out of memory is a result, not an error.

    With `remat` or `unroll` "auto", returns the plan of the first candidate with which all stages fit in memory, or the
    last plan if no candidate fits.

    Args:
      config: the config.
      accelerator: the chips.
      stages: the numbers of the stages; None: all stages.
      real_tokens_share: with packing, the fraction of non-padding tokens in padded sequences for each stage.

    Raises:
      UserError: if the config does not fit the accelerator.
    """
    for candidate in kind_of(config).planning.candidates(config, accelerator.platform, accelerator.generation.kind):
        builder = _Builder(candidate, accelerator, real_tokens_share)
        plans = [builder.plan(number) for number in stages or builder.stages()]
        if all(stage_plan.fits for stage_plan in plans):
            break
    return plans


def settings_that_fit(
    config: ConfigDict, accelerator: Accelerator | Machines, stages: list[int], real_tokens_share: Sequence[float] = ()
) -> Iterator[dict[str, Any]]:
    """Yields settings that make the stages fit in memory according to the compiler, the cheapest first."""
    for settings in _candidates(config, accelerator):
        changed = copy.deepcopy(config)
        changed.update_from_flattened_dict(settings)
        try:
            plans = plan(changed, accelerator, stages, real_tokens_share)
        except UserError:  # for example, the batch size is not divisible
            continue
        if all(stage_plan.fits for stage_plan in plans):
            yield settings


def _candidates(config: ConfigDict, accelerator: Accelerator | Machines) -> Iterator[dict[str, Any]]:
    yield from memory_saving_settings(config)
    devices = accelerator.devices()
    ways = make_mesh(config, devices).shape["fsdp"]
    while ways < len(devices) // accelerator.slices:
        ways *= 2
        yield {"remat": "full", "mesh.data": -1, "mesh.fsdp": ways}


@dataclasses.dataclass(frozen=True)
class _Compiled:
    memory: int  # bytes per device
    module: hlo.HloModule
    seconds: float


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> _Compiled | OutOfMemory:
    began = time.monotonic()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return OutOfMemory(str(error))
    sizes: Any = compiled.memory_analysis()
    memory = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
    memory += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return _Compiled(memory, hlo.HloModule(compiled.as_text() or ""), time.monotonic() - began)


class _Builder:
    """Compiles the steps of a config for an accelerator, and reads the results."""

    def __init__(
        self, config: ConfigDict, accelerator: Accelerator | Machines, real_tokens_share: Sequence[float]
    ) -> None:
        self._config, self._accelerator = config, accelerator
        self._mesh = make_mesh(config, accelerator.devices())
        self._task, self._stages = kind_of(config).planning.open(config, self._mesh, real_tokens_share)
        self._program = Program(self._task, config, self._mesh)

    def stages(self) -> list[int]:
        """Returns the numbers of the stages. Omits parts of stages with a smaller batch, which need less memory."""
        return [number for number, planned in enumerate(self._stages) if not planned.stage.grows]

    def plan(self, number: int) -> StagePlan:
        """Compiles the train step and the evaluation step of a stage."""
        # One after the other: two compilations at the same time have crashed libtpu.
        lowered = self._lower(number)
        return self._read(number, *(_compile(step, self._accelerator.compiler_options) for step in lowered))

    def _lower(self, number: int) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        planned = self._stages[number]
        loss, stage_config = self._task.loss_and_config(planned.stage.first_step)
        hyperparameters = abstract_hyperparameters(self._config, self._mesh)
        train_step = self._program.step_of(loss, stage_config)
        train = train_step.lower(self._program.state, planned.batch, hyperparameters)

        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(loss.cast, self._program.state.params),
            self._program.layout.gathered,
        )
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
            evaluation = planned.evaluate.lower(params, *planned.arguments)
        return train, evaluation

    def _read(self, number: int, train: _Compiled | OutOfMemory, evaluation: _Compiled | OutOfMemory) -> StagePlan:
        accelerator, state = self._accelerator, self._program.state
        planned, per_chip = self._stages[number], accelerator.generation.devices_per_chip
        stage = planned.stage
        loss, stage_config = self._task.loss_and_config(stage.first_step)
        parts = [part for part, *_ in self._stages if part.grows and part.name == stage.name]
        smaller = sum(part.steps * part.batch_size / stage.batch_size for part in parts)
        resting = _bytes_per_device(state)
        used, seconds, least, message, compile_seconds = None, None, None, "", 0.0
        collectives: list[hlo.Collective] = []
        if isinstance(train, _Compiled) and isinstance(evaluation, _Compiled):
            used = max(train.memory, evaluation.memory + resting) * per_chip
            compile_seconds = train.seconds + evaluation.seconds
            collectives, model = train.module.collectives(dict(self._mesh.shape)), families.config_of(stage_config)
            if isinstance(accelerator, Machines):
                dropout = getattr(model, "attention_probs_dropout_prob", 0.0)
                least = roofline(train.module, accelerator, self._mesh, collectives, dropout)
                seconds = least.seconds
            else:
                ways = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
                in_one_call = planned.rows // stage_config.microbatches // ways
                seconds = train.module.estimated_cycles() / accelerator.generation.clock
                seconds += kernel_seconds(
                    train.module.kernels(), accelerator.generation, model, in_one_call, stage.length
                )
        else:
            failed, kept = (train, 0) if isinstance(train, OutOfMemory) else (evaluation, resting)
            assert isinstance(failed, OutOfMemory)
            message = str(failed)
            if failed.needed is not None:
                used = (failed.needed + kept) * per_chip
        return StagePlan(
            stage=number,
            name=stage.name,
            steps=stage.steps + round(smaller),
            chips=accelerator.chips,
            batch_size=stage.batch_size,
            rows=planned.rows,
            length=stage.length,
            params_bytes=_bytes_per_device(state.params) * per_chip,
            optimizer_bytes=_bytes_per_device((state.opt_state, state.average)) * per_chip,
            memory_bytes=_bytes_per_device(state.carry) * per_chip,
            hbm_used_bytes=used,
            hbm_available_bytes=int(accelerator.generation.hbm_bytes),
            flops_per_step=self._task.flops(stage.first_step, stage.first_step + 1),
            estimated_step_seconds=seconds,
            peak_flops=accelerator.generation.peak_flops * accelerator.chips,
            collectives=collectives,
            remat=self._config.remat,
            unroll=cast(Any, loss).model.compute.unroll,
            compile_seconds=compile_seconds,
            out_of_memory=message,
            roofline=least,
        )


def _bytes_per_device(arrays: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
