"""A lower bound of the time of a step on a GPU. The compiler has no estimate for GPUs.

The bound of a kernel is the longest of three times: of the matrix products at the rate of the data sheet, of the other
operations at `Gpu.vector_rate`, and of the memory traffic. Kernels run one after the other, and collectives may overlap
with kernels. A real step also takes time for launches and waiting, and no kernel reaches these rates. Arrays in the L2
cache are counted as memory traffic. A small model, whose arrays fit in the cache, may therefore be faster than this
bound.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from bertjax.distributed.gpus import Gpu, Machines
from bertjax.nn.kernels.gpu_attention import work_of
from bertjax.planner.hlo import KINDS, Collective, HloModule, Instruction, bytes_of, kernel_of, operation_of

PRODUCTS, ATTENTION, ELEMENTS = "matrix products", "attention", "norms, elementwise"
OPTIMIZER, COLLECTIVES = "optimizer, casts", "collectives"

# Instructions without a kernel: names for arrays, and ends of earlier instructions. The bodies of loops are counted.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "after-all", "partition-id",
    "replica-id", "opt-barrier", "iota",
}  # fmt: skip
_PIECES = ("slice", "dynamic-slice", "gather")  # read the size of their result
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # write the operand with this number into the first operand
_NO_WORK = {*_FREE, *_PIECES, *_IN_PLACE, "broadcast", "reshape", "transpose", "copy", "concatenate", "pad", "reverse"}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of the kernels with one name and category in a step on one device."""

    category: str
    name: str  # the name of a Pallas kernel, or an opcode of the compiler
    calls: int
    flops: float  # matrix products only
    bytes: float
    seconds: float  # at least


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A lower bound of the time of a step, and its parts, the longest first."""

    works: list[Work]

    @property
    def seconds(self) -> float:
        """The time of the kernels, or of the collectives if this is longer."""
        collectives = self.by_category().get(COLLECTIVES, 0.0)
        return max(collectives, sum(work.seconds for work in self.works) - collectives)

    def by_category(self) -> dict[str, float]:
        """Returns {category: seconds}."""
        totals: dict[str, float] = {}
        for work in self.works:
            totals[work.category] = totals.get(work.category, 0.0) + work.seconds
        return totals


def roofline(
    module: HloModule, target: Machines, mesh: Mesh, collectives: Sequence[Collective], dropout: float
) -> Roofline:
    """Returns the lower bound of a compiled step.

    Args:
      module: the compiled step.
      target: the GPUs.
      mesh: the mesh of the GPUs.
      collectives: the collectives of the step.
      dropout: the dropout rate of attention probabilities.
    """
    reader = _Reader(module, target.generation, dropout)
    works = [
        (times, work)
        for computation, line, times in module.executed()
        if (work := reader.read(computation, line)) is not None
    ]
    for collective in collectives:
        seconds = _transfer_seconds(collective, target, mesh)
        works.append((1, Work(COLLECTIVES, collective.kind, collective.count, 0, collective.bytes, seconds)))
    totals: dict[tuple[str, str], list[Any]] = {}
    for times, work in works:
        category, name, *numbers = dataclasses.astuple(work)
        sums = totals.get((category, name), [0, 0, 0, 0.0])
        totals[category, name] = [total + times * number for total, number in zip(sums, numbers)]
    return Roofline(sorted((Work(*key, *sums) for key, sums in totals.items()), key=lambda work: -work.seconds))


class _Reader:
    """Reads the work of instructions."""

    def __init__(self, module: HloModule, gpu: Gpu, dropout: float) -> None:
        self._module, self._gpu, self._dropout = module, gpu, dropout
        self._works: dict[str, Work | None] = {}

    def read(self, computation: str, line: str) -> Work | None:
        """Returns the work of an instruction; None if the instruction is not a kernel."""
        if line not in self._works:
            instruction = self._module.computation(computation).get(_name(line))
            is_kernel = instruction and instruction.opcode not in _FREE and not _is_transfer(instruction.opcode)
            self._works[line] = self._work(computation, instruction) if instruction and is_kernel else None
        return self._works[line]

    def _work(self, computation: str, instruction: Instruction) -> Work:
        gpu = self._gpu
        if kernel := kernel_of(instruction.line):
            flops, operations, size = 0, 0, kernel.bytes
            if kernel.name.startswith("gpu_attention"):
                shape = self._module.computation(computation)[instruction.operands[0]].arrays[0][1]
                flops, operations, written = work_of(kernel.name, shape, self._dropout)
                size -= round((1 - written) * instruction.bytes)
            seconds = max(flops / gpu.peak_flops, operations / gpu.vector_rate, size / gpu.bandwidth)
            category = ATTENTION if flops else ELEMENTS
            return Work(category, kernel.name, 1, flops, size, seconds)
        products = self._products(computation, instruction)
        flops = sum(flops for _, flops, _ in products)
        # Factors of float32 are rounded to TensorFloat-32, which has half the rate.
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
        """Returns the `op_name` of an instruction, or of the last instruction in a fusion that has an `op_name`."""
        inner = self._module.computation(instruction.called).values()
        return next(filter(None, (operation_of(part.line) for part in (instruction, *reversed(inner)))), "")

    def _products(self, computation: str, instruction: Instruction) -> list[tuple[str, int, bool]]:
        """Returns the dtype, the FLOPs, and whether there is a batch axis, for each matrix product."""
        instructions = self._module.computation(computation)
        if instruction.opcode == "dot":
            left, right = (instructions[name].arrays[0] for name in instruction.operands)
            contracted = math.prod(left[1][axis] for axis in _dimensions(instruction, "lhs_contracting_dims"))
            is_batched = bool(_dimensions(instruction, "lhs_batch_dims"))
            dtype = "f32" if "f32" in (left[0], right[0]) else left[0]
            return [(dtype, 2 * contracted * math.prod(instruction.arrays[0][1]), is_batched)]
        if _is_blas(instruction):
            # [b, m, k] times [b, k, n] is [b, m, n]: the product of the sizes is b (b m k n)^2.
            arrays = [*(instructions[name].arrays[0] for name in instruction.operands[:2]), instruction.arrays[0]]
            batch = _batch(instruction.attributes, arrays[0][1])
            sizes = math.prod(math.prod(shape) for _, shape in arrays)
            return [(arrays[0][0], 2 * math.isqrt(sizes // batch), batch > 1)]
        if instruction.opcode != "fusion" or not instruction.called:
            return []
        inner = self._module.computation(instruction.called).values()
        return [product for part in inner for product in self._products(instruction.called, part)]

    def _operations(self, instruction: Instruction) -> int:
        """Returns the number of elements that operations other than products compute."""
        if instruction.opcode == "fusion":
            return sum(self._operations(part) for part in self._module.computation(instruction.called).values())
        if instruction.opcode in _NO_WORK or instruction.opcode in ("dot", "custom-call"):
            return 0
        return max((math.prod(shape) for _, shape in instruction.arrays), default=0)

    def _read_bytes(self, computation: str, instruction: Instruction) -> int:
        instructions = self._module.computation(computation)
        if instruction.opcode == "fusion":
            names = _parameters(self._module.computation(instruction.called))
            return sum(self._used_bytes(instruction.called, names[i]) for i in range(len(instruction.operands)))
        if instruction.opcode in _PIECES:
            return instruction.bytes
        operands = [instructions[name] for name in dict.fromkeys(instruction.operands) if name in instructions]
        skipped = 1 if instruction.opcode in _IN_PLACE else 0
        return sum(operand.bytes for operand in operands[skipped:])

    def _used_bytes(self, computation: str, name: str) -> int:
        """Returns the number of bytes of a value that a fusion reads."""
        instructions, total = self._module.computation(computation), 0
        for user in instructions.values():
            if name not in user.operands:
                continue
            if user.opcode in _PIECES and user.operands[0] == name:
                total += user.bytes
            elif user.opcode in ("bitcast", "reshape"):
                total += self._used_bytes(computation, user.name)
            elif user.opcode == "fusion":
                parameter = _parameters(self._module.computation(user.called))[user.operands.index(name)]
                total += self._used_bytes(user.called, parameter)
            elif user.opcode not in _IN_PLACE or user.operands[0] != name:
                return instructions[name].bytes
        return min(total, instructions[name].bytes)

    def _written_bytes(self, computation: str, instruction: Instruction) -> int:
        instructions = self._module.computation(computation)
        if instruction.opcode == "fusion":
            inner = self._module.computation(instruction.called)
            return self._written_bytes(instruction.called, next(part for part in inner.values() if part.is_root))
        if instruction.opcode in ("bitcast", "tuple"):
            return sum(self._written_bytes(computation, instructions[name]) for name in instruction.operands)
        if _is_blas(instruction):  # the other arrays are workspace
            return bytes_of(*instruction.arrays[0])
        if instruction.opcode in _IN_PLACE:
            return instructions[instruction.operands[_IN_PLACE[instruction.opcode]]].bytes
        return instruction.bytes


def _name(line: str) -> str:
    return line.removeprefix("  ").removeprefix("ROOT ").removeprefix("%").partition(" = ")[0]


def _is_transfer(opcode: str) -> bool:
    """Returns whether an instruction is a collective, or the end of an asynchronous instruction."""
    return opcode.startswith((*KINDS, "send", "recv")) or opcode.endswith("-done")


def _is_blas(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and 'custom_call_target="__cublas$' in instruction.attributes


def _parameters(computation: dict[str, Instruction]) -> dict[int, str]:
    """Returns the names of the parameters of a computation by number."""
    parameters = (part for part in computation.values() if part.opcode == "parameter")
    return {int(part.line.partition(" parameter(")[2].partition(")")[0]): part.name for part in parameters}


def _dimensions(instruction: Instruction, field: str) -> list[int]:
    axes = instruction.attributes.partition(f"{field}={{")[2].partition("}")[0]
    return [int(axis) for axis in axes.split(",") if axis]


def _batch(attributes: str, shape: tuple[int, ...]) -> int:
    axes = attributes.partition('"lhs_batch_dimensions":[')[2].partition("]")[0]
    return math.prod(shape[int(axis.strip('"'))] for axis in axes.split(",") if axis)


def _transfer_seconds(collective: Collective, target: Machines, mesh: Mesh) -> float:
    """Returns the least time of collectives, as if all links and network adapters were busy all the time."""
    index = tuple(slice(None) if axis in collective.axes else 0 for axis in mesh.axis_names)
    group = mesh.devices[index].ravel()
    hosts = len({device.process_index for device in group})
    inside = len(group) // hosts
    gpu, rounds = target.generation, 2 if collective.kind == "all-reduce" else 1
    if collective.kind == "collective-permute":
        return collective.bytes / (gpu.network if hosts > 1 else gpu.link)
    # Data from other machines arrives once, or once for each GPU if the GPUs receive different data.
    is_shared = collective.kind != "all-to-all"
    within = (inside - 1) / (inside if is_shared else len(group)) * collective.bytes / gpu.link
    between = (hosts - 1) / hosts * collective.bytes / (inside if is_shared else 1) / gpu.network
    return rounds * max(within, between)
