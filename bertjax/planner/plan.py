"""Plans a config for TPUs or GPUs without the hardware: compiles its train and evaluation steps."""

import copy
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax

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
from bertjax.training.step import abstract_hyperparameters, make_program


class OutOfMemory(Exception):
    """The compiler ran out of HBM. `needed`: bytes per JAX device; None if the compiler does not report it."""

    def __init__(self, message: str):
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
    steps: int  # with those of a batch that still grows, in proportion to its size; 0: the data says how many
    chips: int
    batch_size: int
    rows: int  # rows of a batch; fewer than its sequences if these are packed
    length: int
    params_bytes: int  # at rest
    optimizer_bytes: int
    memory_bytes: int  # what rows remember that go on in the next step
    hbm_used_bytes: int | None  # maximum of train and evaluation step; None: out of memory, amount unknown
    hbm_available_bytes: int
    flops_per_step: int
    estimated_step_seconds: float | None  # on GPUs at least, see `roofline`
    peak_flops: float  # peak FLOP/s of all chips together
    collectives: list[hlo.Collective]
    remat: str
    unroll: bool
    compile_seconds: float
    out_of_memory: str = ""  # the compiler's message; empty if it compiled
    roofline: Roofline | None = None  # None on a TPU

    @property
    def activations_bytes(self) -> int:
        """HBM without what is kept between steps: activations, gathered weights, gradients, the program."""
        return self.hbm_used_bytes - self.params_bytes - self.optimizer_bytes - self.memory_bytes

    @property
    def fits(self) -> bool:
        return not self.out_of_memory and self.hbm_used_bytes <= self.hbm_available_bytes

    @property
    def estimated_mfu(self) -> float | None:
        if self.estimated_step_seconds is None:
            return None
        return self.flops_per_step / (self.estimated_step_seconds * self.peak_flops)


def plan(
    config,
    accelerator: Accelerator | Machines,
    stages: list[int] | None = None,
    real_tokens_share: Sequence[float] = (),
) -> list[StagePlan]:
    """Compiles the train and evaluation steps of all stages, or of `stages`. Raises `UserError` if the config does not
    suit the accelerator; running out of memory is a result, not an error.

    With `remat` or `unroll` "auto", returns the plan of the first candidate with which all stages fit in memory; the
    last plan if none fits. With packing, `real_tokens_share` is the fraction of non-padding tokens in padded sequences,
    for each stage of the config.
    """
    for candidate in kind_of(config).planning.candidates(config, accelerator.platform, accelerator.generation.kind):
        results = _plan(candidate, accelerator, stages, real_tokens_share)
        if all(result.fits for result in results):
            break
    return results


def _plan(config, accelerator: Accelerator | Machines, stages: list[int] | None, real_tokens_share) -> list[StagePlan]:
    builder, options = _Builder(config, accelerator, real_tokens_share), accelerator.compiler_options
    # One after the other: two compilations at once have crashed libtpu.
    return [
        builder.read(number, *(_compile(each, options) for each in builder.lower(number)))
        for number in stages or builder.stages()
    ]


def settings_that_fit(
    config, accelerator: Accelerator | Machines, stages: list[int], real_tokens_share: Sequence[float] = ()
) -> Iterator[dict]:
    """Yields settings that save memory and with which, according to the compiler, the stages fit; cheapest first."""
    for settings in _candidates(config, accelerator):
        changed = copy.deepcopy(config)
        for name, value in settings.items():
            section, _, field = name.rpartition(".")
            (changed[section] if section else changed)[field] = value
        try:
            results = plan(changed, accelerator, stages, real_tokens_share)
        except UserError:  # for example, the batch size is not divisible
            continue
        if all(result.fits for result in results):
            yield settings


def _candidates(config, accelerator: Accelerator | Machines) -> Iterator[dict]:
    yield from memory_saving_settings(config)
    devices = accelerator.devices()
    ways = make_mesh(config, devices).shape["fsdp"]
    while ways < len(devices) // accelerator.slices:
        ways *= 2
        yield {"remat": "full", "mesh.data": -1, "mesh.fsdp": ways}


@dataclasses.dataclass(frozen=True)
class _Compiled:
    memory: int  # bytes per device
    cycles: int
    module: hlo.HloModule
    seconds: float


def _compile(lowered, options: dict[str, str]) -> _Compiled | OutOfMemory:
    began = time.monotonic()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return OutOfMemory(str(error))
    sizes = compiled.memory_analysis()
    memory = (
        sizes.argument_size_in_bytes
        + sizes.temp_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.generated_code_size_in_bytes
    )
    module = hlo.HloModule(compiled.as_text())
    return _Compiled(memory, module.estimated_cycles(), module, time.monotonic() - began)


class _Builder:
    """Lowers the steps of a config for an accelerator, and reads the compiled results."""

    def __init__(self, config, accelerator: Accelerator | Machines, real_tokens_share: Sequence[float]):
        self._config, self._accelerator = config, accelerator
        self._mesh = make_mesh(config, accelerator.devices())
        self._task, self._stages = kind_of(config).planning.open(config, self._mesh, real_tokens_share)
        self._program = make_program(self._task, config, self._mesh)

    def stages(self) -> list[int]:
        """Returns the numbers of the stages; a batch that still grows needs less than it will."""
        return [number for number, planned in enumerate(self._stages) if not planned.stage.grows]

    def lower(self, number: int):
        """Lowers the train step and the evaluation step of a stage."""
        task, planned = self._task, self._stages[number]
        hyperparameters = abstract_hyperparameters(self._config, self._mesh)
        train_step = self._program.step_of(*task.loss_and_config(planned.stage.first_step))
        train = train_step.lower(self._program.state, planned.batch, hyperparameters)

        loss, _ = task.loss_and_config(planned.stage.first_step)
        cast = jax.eval_shape(loss.cast, self._program.state.params)
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            cast,
            self._program.layout.gathered,
        )
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
            evaluation = planned.evaluate.lower(params, *planned.arguments)
        return train, evaluation

    def read(self, number: int, train: _Compiled | OutOfMemory, evaluation: _Compiled | OutOfMemory) -> StagePlan:
        config, generation = self._config, self._accelerator.generation
        (stage, rows, *_), per_chip = self._stages[number], generation.devices_per_chip
        loss, stage_config = self._task.loss_and_config(stage.first_step)
        growing = [each for each, *_ in self._stages if each.grows and each.name == stage.name]
        smaller = sum(each.steps * each.batch_size / stage.batch_size for each in growing)
        failed = next((result for result in (train, evaluation) if isinstance(result, OutOfMemory)), None)
        resting = _bytes_per_device(self._program.state)
        used = seconds = least = None
        collectives = []
        if failed is None:
            used = max(train.memory, evaluation.memory + resting) * per_chip
            ways = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
            in_one_call = rows // stage_config.microbatches // ways
            collectives, model = train.module.collectives(dict(self._mesh.shape)), families.config_of(stage_config)
            if self._accelerator.platform == "gpu":
                dropout = getattr(model, "attention_probs_dropout_prob", 0.0)
                least = roofline(train.module, self._accelerator, self._mesh, collectives, dropout)
                seconds = least.seconds
            else:
                kernels = train.module.kernels()
                seconds = train.cycles / generation.clock
                seconds += kernel_seconds(kernels, generation, model, in_one_call, stage.length)
        elif failed.needed is not None:
            used = (failed.needed + (resting if failed is evaluation else 0)) * per_chip
        return StagePlan(
            stage=number,
            name=stage.name,
            steps=stage.steps + round(smaller),
            chips=self._accelerator.chips,
            batch_size=stage.batch_size,
            rows=rows,
            length=stage.length,
            params_bytes=_bytes_per_device(self._program.state.params) * per_chip,
            optimizer_bytes=_bytes_per_device((self._program.state.opt_state, self._program.state.average)) * per_chip,
            memory_bytes=_bytes_per_device(self._program.state.carry) * per_chip,
            hbm_used_bytes=used,
            hbm_available_bytes=int(generation.hbm_bytes),
            flops_per_step=self._task.flops(stage.first_step, stage.first_step + 1),
            estimated_step_seconds=seconds,
            peak_flops=generation.peak_flops * self._accelerator.chips,
            collectives=collectives,
            remat=config.remat,
            unroll=loss.model.compute.unroll,
            compile_seconds=0.0 if failed else train.seconds + evaluation.seconds,
            out_of_memory=str(failed) if failed else "",
            roofline=least,
        )


def _bytes_per_device(arrays) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
