"""The least time of a step on a GPU, for which the compiler has no estimate.

No kernel is faster than its matrix products at the data sheet's rate, than its other operations at `Gpu.vector_rate`,
and than the memory that it reads and writes once. Kernels follow one another; collectives may hide behind them.
Launches, waiting, and rates that no kernel reaches come on top. What stays in the L2 cache from one kernel to the next
is counted as if it went through memory: a model so small that its arrays fit there may be faster than this.
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from bertjax.distributed.gpus import Gpu, Machines
from bertjax.nn.kernels.gpu_attention import work_of
from bertjax.planner.hlo import KINDS, Collective, HloModule, Instruction, bytes_of, kernel_of, operation_of

PRODUCTS, ATTENTION, ELEMENTS = "matrix products", "attention", "norms, elementwise"
OPTIMIZER, COLLECTIVES = "optimizer, casts", "collectives"

# No kernel: names for arrays, and the ends of what began before; loops count by their bodies.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "after-all", "partition-id",
    "replica-id", "opt-barrier", "iota",
}  # fmt: skip
_PIECES = ("slice", "dynamic-slice", "gather")  # read as much as they return
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # write their operand of this number
_NO_WORK = {*_FREE, *_PIECES, *_IN_PLACE, "broadcast", "reshape", "transpose", "copy", "concatenate", "pad", "reverse"}


@dataclasses.dataclass(frozen=True)
class Work:
    """What kernels of one name and category do in a step on one device."""

    category: str
    name: str  # a kernel of ours, or the compiler's opcode
    calls: int
    flops: float  # matrix products only
    bytes: float
    seconds: float  # at least


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time of a step, with what it is made of, the longest first."""

    works: list[Work]

    @property
    def seconds(self) -> float:
        """The kernels' time, or that of the collectives if it is longer."""
        collectives = self.by_category().get(COLLECTIVES, 0.0)
        return max(collectives, sum(work.seconds for work in self.works) - collectives)

    def by_category(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for work in self.works:
            totals[work.category] = totals.get(work.category, 0.0) + work.seconds
        return totals


def roofline(
    module: HloModule, target: Machines, mesh: Mesh, collectives: Sequence[Collective], dropout: float
) -> Roofline:
    """Adds up a compiled step.

    Args:
      dropout: the rate of attention's probabilities.
    """
    reader, totals = _Reader(module, target.generation, dropout), {}
    for computation, line, times in module.executed():
        for work in reader.read(computation, line):
            _add(totals, dataclasses.replace(work, calls=1), times)
    for each in collectives:
        seconds = _transfer_seconds(each, target, mesh)
        _add(totals, Work(COLLECTIVES, each.kind, each.count, 0, each.bytes, seconds), 1)
    return Roofline(sorted(totals.values(), key=lambda work: -work.seconds))


def _add(totals: dict, work: Work, times: int) -> None:
    key = work.category, work.name
    old = totals.get(key, Work(*key, 0, 0, 0, 0.0))
    totals[key] = Work(
        *key,
        old.calls + times * work.calls,
        old.flops + times * work.flops,
        old.bytes + times * work.bytes,
        old.seconds + times * work.seconds,
    )


class _Reader:
    """Reads what instructions do."""

    def __init__(self, module: HloModule, gpu: Gpu, dropout: float):
        self._module, self._gpu, self._dropout = module, gpu, dropout
        self._known: dict[str, list[Work]] = {}

    def read(self, computation: str, line: str) -> list[Work]:
        """Returns the work of an instruction: nothing, if it is no kernel."""
        if line not in self._known:
            instruction = self._module.computation(computation).get(_name(line))
            is_work = instruction and instruction.opcode not in _FREE and not _is_transfer(instruction.opcode)
            self._known[line] = [self._work(computation, instruction)] if is_work else []
        return self._known[line]

    def _work(self, computation: str, instruction: Instruction) -> Work:
        gpu = self._gpu
        if kernel := kernel_of(instruction.line):
            products, operations, size = 0, 0, kernel.bytes
            if kernel.name.startswith("gpu_attention"):
                shape = self._module.computation(computation)[instruction.operands[0]].arrays[0][1]
                products, operations, written = work_of(kernel.name, shape, self._dropout)
                size -= round((1 - written) * instruction.bytes)
            seconds = max(products / gpu.peak_flops, operations / gpu.vector_rate, size / gpu.bandwidth)
            category = ATTENTION if products else ELEMENTS
            return Work(category, kernel.name, 1, products, size, seconds)
        products = self._products(computation, instruction)
        flops = sum(flops for _, flops, _ in products)
        # Factors of float32 are rounded to TensorFloat-32, whose rate is half.
        matrix = sum(flops * (2 if dtype == "f32" else 1) for dtype, flops, _ in products) / gpu.peak_flops
        operations, size = self._operations(instruction), self._read_bytes(computation, instruction)
        size += self._written_bytes(computation, instruction)
        seconds = max(matrix, operations / gpu.vector_rate, size / gpu.bandwidth)
        category = self._category(instruction, [is_batched for *_, is_batched in products])
        return Work(category, "product" if products else instruction.opcode, 1, flops, size, seconds)

    def _category(self, instruction: Instruction, products: list[bool]) -> str:
        operation = self._operation(instruction)
        if products:
            is_attention = any(products) and "/attention/" in operation and ".product" not in operation
            return ATTENTION if is_attention else PRODUCTS
        is_model = "jvp(" in operation or "vmap(" in operation or not operation
        return ELEMENTS if is_model else OPTIMIZER

    def _operation(self, instruction: Instruction) -> str:
        """Returns where an instruction comes from; of a fusion that does not say, where what is in it does."""
        inner = self._module.computation(instruction.called).values() if instruction.called else ()
        return next(filter(None, (operation_of(each.line) for each in (instruction, *reversed(inner)))), "")

    def _products(self, computation: str, instruction: Instruction) -> list[tuple[str, int, bool]]:
        """Returns of each matrix product the type, the FLOPs, and whether it is one of a batch."""
        own = self._module.computation(computation)
        if instruction.opcode == "dot":
            left, right = (own[name].arrays[0] for name in instruction.operands)
            contracted = math.prod(left[1][axis] for axis in _dimensions(instruction, "lhs_contracting_dims"))
            is_batched = bool(_dimensions(instruction, "lhs_batch_dims"))
            dtype = "f32" if "f32" in (left[0], right[0]) else left[0]
            return [(dtype, 2 * contracted * math.prod(instruction.arrays[0][1]), is_batched)]
        if _is_blas(instruction):
            # [b, m, k] times [b, k, n] is [b, m, n]: the product of their sizes is b (b m k n)^2.
            arrays = [*(own[name].arrays[0] for name in instruction.operands[:2]), instruction.arrays[0]]
            batch = _batch(instruction.attributes, arrays[0][1])
            sizes = math.prod(math.prod(shape) for _, shape in arrays)
            return [(arrays[0][0], 2 * math.isqrt(sizes // batch), batch > 1)]
        if instruction.opcode != "fusion" or not instruction.called:
            return []
        inner = self._module.computation(instruction.called).values()
        return [product for each in inner for product in self._products(instruction.called, each)]

    def _operations(self, instruction: Instruction) -> int:
        """Returns the elements that operations other than products compute."""
        if instruction.opcode == "fusion":
            return sum(map(self._operations, self._module.computation(instruction.called).values()))
        if instruction.opcode in _NO_WORK or instruction.opcode in ("dot", "custom-call"):
            return 0
        return max((math.prod(shape) for _, shape in instruction.arrays), default=0)

    def _read_bytes(self, computation: str, instruction: Instruction) -> int:
        own = self._module.computation(computation)
        operands = [own[name] for name in dict.fromkeys(instruction.operands) if name in own]
        if instruction.opcode == "fusion":
            inner = self._module.computation(instruction.called)
            names = _parameters(inner)
            used = (self._used_bytes(instruction.called, names[place]) for place in range(len(instruction.operands)))
            return sum(used)
        if instruction.opcode in _PIECES:
            return instruction.bytes
        skipped = 1 if instruction.opcode in _IN_PLACE else 0
        return sum(each.bytes for each in operands[skipped:])

    def _used_bytes(self, computation: str, name: str) -> int:
        """Returns how much of a value of a fusion is read."""
        own, total = self._module.computation(computation), 0
        for user in own.values():
            if name not in user.operands:
                continue
            if user.opcode in _PIECES and user.operands[0] == name:
                total += user.bytes
            elif user.opcode in ("bitcast", "reshape"):
                total += self._used_bytes(computation, user.name)
            elif user.opcode == "fusion":
                place = _parameters(self._module.computation(user.called))[user.operands.index(name)]
                total += self._used_bytes(user.called, place)
            elif user.opcode not in _IN_PLACE or user.operands[0] != name:
                return own[name].bytes
        return min(total, own[name].bytes)

    def _written_bytes(self, computation: str, instruction: Instruction) -> int:
        own = self._module.computation(computation)
        if instruction.opcode == "fusion":
            inner = self._module.computation(instruction.called)
            return self._written_bytes(instruction.called, next(each for each in inner.values() if each.is_root))
        if instruction.opcode in ("bitcast", "tuple"):
            return sum(self._written_bytes(computation, own[name]) for name in instruction.operands)
        if _is_blas(instruction):  # the rest is workspace
            return bytes_of(*instruction.arrays[0])
        if instruction.opcode in _IN_PLACE:
            return own[instruction.operands[_IN_PLACE[instruction.opcode]]].bytes
        return instruction.bytes


def _name(line: str) -> str:
    return line.removeprefix("  ").removeprefix("ROOT ").removeprefix("%").partition(" = ")[0]


def _is_transfer(opcode: str) -> bool:
    """Returns whether an instruction is a collective, or ends something that went on beside others."""
    return opcode.startswith((*KINDS, "send", "recv")) or opcode.endswith("-done")


def _is_blas(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and 'custom_call_target="__cublas$' in instruction.attributes


def _parameters(computation: dict[str, Instruction]) -> dict[int, str]:
    """Returns the names of a computation's parameters by number."""
    found = (each for each in computation.values() if each.opcode == "parameter")
    return {int(each.line.partition(" parameter(")[2].partition(")")[0]): each.name for each in found}


def _dimensions(instruction: Instruction, field: str) -> list[int]:
    found = instruction.attributes.partition(f"{field}={{")[2].partition("}")[0]
    return [int(axis) for axis in found.split(",") if axis]


def _batch(attributes: str, shape: tuple[int, ...]) -> int:
    found = attributes.partition('"lhs_batch_dimensions":[')[2].partition("]")[0]
    return math.prod(shape[int(axis.strip('"'))] for axis in found.split(",") if axis)


def _transfer_seconds(collective: Collective, target: Machines, mesh: Mesh) -> float:
    """Returns the least time of collectives, each link and each network adapter carrying its share all the time."""
    others = [axis for axis in mesh.axis_names if axis not in collective.axes]
    group = mesh.devices[tuple(0 if axis in others else slice(None) for axis in mesh.axis_names)].ravel()
    hosts = len({device.process_index for device in group})
    inside = len(group) // hosts
    gpu, rounds = target.generation, 2 if collective.kind == "all-reduce" else 1
    if collective.kind == "collective-permute":
        return collective.bytes / (gpu.network if hosts > 1 else gpu.link)
    # What comes from other machines comes once, or, if each GPU gets something else, once for each of them.
    is_shared = collective.kind != "all-to-all"
    within = (inside - 1) / (inside if is_shared else len(group)) * collective.bytes / gpu.link
    between = (hosts - 1) / hosts * collective.bytes / (inside if is_shared else 1) / gpu.network
    return rounds * max(within, between)
