"""Parses the text of a compiled program: instructions, estimates of the compiler, kernels and collectives."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8,
    "s64": 8, "u64": 8,
}  # fmt: skip
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_KERNEL = re.compile(
    r' = (.*?) custom-call\(.*custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)", '
    r"operand_layout_constraints=(\{.*?\}\}).*?"
    r"(\w+)\)*/pallas_call"
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_ALIASED = re.compile(r"output_to_operand_aliasing=\{\{\d*\}: \((\d+), ")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d+\)[^}]*\}")  # an array whose layout names another memory than HBM
_CONTEXT = re.compile(r"\bu32\[\]")  # the state of an unfinished transfer of a TPU
_NAMED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The sum of the collectives of a step that have the same kind, mesh axes, dtype and loop status."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices communicate
    dtype: str
    bytes: int  # per step: the bytes of the whole gathered or summed arrays, or of the part that a device exchanges
    count: int  # collectives per step
    in_loop: bool  # inside a loop over layers or microbatches


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel of bertjax. The compiler has no estimate for such a kernel."""

    name: str
    bytes: int  # bytes that one call reads and writes
    times: int = 1  # calls per step


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The compiler's estimate for an instruction, such as a fusion, and the work of the instruction."""

    operation: str  # the `op_name`: the path of modules and functions; "" if unknown
    cycles: int
    flops: int  # matrix products only
    bytes: int  # reads from HBM and writes to it
    times: int  # per step


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str  # the shape of an array, or (...) with the shapes of several arrays
    opcode: str
    operands: tuple[str, ...]  # names
    attributes: str
    line: str
    is_root: bool

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and the sizes of each array of the result."""
        return _arrays_of(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the result."""
        return _bytes_of_shape(self.shape)

    @property
    def called(self) -> str:
        """The computation that the instruction calls, or ""."""
        match = _CALLED.search(self.attributes)
        return match[1] if match else ""


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of an array."""
    return BYTES.get(dtype, 0) * math.prod(shape)


def _arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the dtype and the sizes of each array of a shape."""
    return [(dtype, _ints(sizes)) for dtype, sizes in _ARRAY.findall(shape)]


def _bytes_of_shape(shape: str) -> int:
    return sum(bytes_of(*array) for array in _arrays_of(shape))


def _elements(shape: str) -> int:
    return sum(math.prod(sizes) for _, sizes in _arrays_of(shape))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def instruction_of(line: str) -> Instruction | None:
    """Parses a line; returns None if the line has no instruction."""
    named = _NAMED.match(line)
    if not named:
        return None
    shape, rest = _cut(line[named.end() :], " ")
    opcode, rest = _cut(rest, "(")
    inside, attributes = _cut("(" + rest, ",")
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(named[2], shape, opcode, operands, attributes, line, named[1] is not None)


def _cut(text: str, separator: str) -> tuple[str, str]:
    """Splits at the first separator that is not between parentheses."""
    depth = 0
    for place, letter in enumerate(text):
        if not depth and letter == separator:
            return text[:place], text[place + 1 :]
        depth += (letter == "(") - (letter == ")")
    return text, ""


def kernel_of(line: str) -> Kernel | None:
    """Returns the kernel that an instruction calls; None for another instruction."""
    if not (match := _KERNEL.search(line)):
        return None
    size = _bytes_of_shape(match[1]) + _bytes_of_shape(match[2])
    for number in _ALIASED.findall(line):  # the result replaces this operand
        size -= bytes_of(*_arrays_of(match[2])[int(number)])
    return Kernel(match[3], size)


def operation_of(line: str) -> str:
    """Returns the `op_name` of an instruction, or ""."""
    match = _OPERATION.search(line)
    return match[1] if match else ""


class HloModule:
    """The computations of a compiled program, and the number of times that a step runs each computation."""

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            if header := _HEADER.match(line):
                lines = self._lines.setdefault(header[2], [])
                if header[1]:
                    self._entry = header[2]
            else:
                lines.append(line)
        self._parsed: dict[str, dict[str, Instruction]] = {}
        self._times: dict[str, int] = {}
        self._walk(self._entry, 1)

    def _walk(self, name: str, times: int) -> None:
        # The minimum over all callers: a collective that is split over the iterations of a loop counts once.
        if times >= self._times.get(name, math.inf):
            return
        self._times[name] = times
        for line in self._lines.get(name, ()):
            if loop := _WHILE.search(line):
                self._walk(loop[2], times * self._trip_count(loop))
            else:
                for called in _CALLED.findall(line):
                    self._walk(called, times)

    def _trip_count(self, loop: re.Match[str]) -> int:
        """Returns the trip count of a loop: from the compiler (GPUs), or the constant in the condition of a scan."""
        if known := _TRIPS.search(loop.string):
            return int(known[1])
        return max(map(int, re.findall(r" constant\((\d+)\)", "\n".join(self._lines[loop[1]]))), default=1)

    def executed(self) -> Iterator[tuple[str, str, int]]:
        """Yields (computation, line, times per step) of the entry and of the bodies of loops."""
        yield from self._executed(self._entry, 1)

    def _executed(self, name: str, times: int) -> Iterator[tuple[str, str, int]]:
        for line in self._lines.get(name, ()):
            yield name, line, times
            if loop := _WHILE.search(line):
                yield from self._executed(loop[2], times * self._trip_count(loop))

    def computation(self, name: str) -> dict[str, Instruction]:
        """Returns the instructions of a computation by name."""
        if name not in self._parsed:
            instructions = filter(None, map(instruction_of, self._lines.get(name, ())))
            self._parsed[name] = {instruction.name: instruction for instruction in instructions}
        return self._parsed[name]

    def estimated_cycles(self) -> int:
        """Returns the sum of the compiler's cycle estimates; a loop body counts once per iteration."""
        return sum(times * sum(map(int, _CYCLES.findall(line))) for _, line, times in self.executed())

    def estimates(self) -> list[Estimate]:
        """Returns the compiler's estimates, for all instructions that have an estimate."""
        estimates = []
        for name, line, times in self.executed():
            cycles = sum(map(int, _CYCLES.findall(line)))
            if cycles and (instruction := instruction_of(line)):
                flops, size = self._flops(name, instruction), self._hbm_bytes(name, instruction)
                estimates.append(Estimate(operation_of(line), cycles, flops, size, times))
        return estimates

    def _flops(self, name: str, instruction: Instruction) -> int:
        """Returns the FLOPs of the products in an instruction of a computation, and in the called computations."""
        flops = sum(
            self._flops(called, inner)
            for called in _CALLED.findall(instruction.attributes)
            for inner in self.computation(called).values()
        )
        if instruction.opcode in ("convolution", "dot"):
            # The sizes m k, k n and m n of the factors and the product multiply to the square of m k n.
            shapes = instruction.shape, *self._operand_shapes(name, instruction)[:2]
            flops += 2 * math.isqrt(math.prod(map(_elements, shapes)))
        return flops

    def _hbm_bytes(self, name: str, instruction: Instruction) -> int:
        shapes = instruction.shape, *self._operand_shapes(name, instruction)
        return sum(_bytes_of_shape(_ON_CHIP.sub("", shape)) for shape in shapes)

    def _operand_shapes(self, name: str, instruction: Instruction) -> list[str]:
        instructions = self.computation(name)
        return [instructions[name].shape if name in instructions else "" for name in instruction.operands]

    def kernels(self) -> list[Kernel]:
        """Returns the kernels of a step."""
        lines = ((line, times) for name, times in self._times.items() for line in self._lines.get(name, ()))
        return [dataclasses.replace(kernel, times=times) for line, times in lines if (kernel := kernel_of(line))]

    def collectives(self, mesh_shape: dict[str, int]) -> list[Collective]:
        """Returns the collectives of a step, the largest first."""
        calls: dict[tuple[str, str], tuple[int, tuple[str, ...], dict[str, int]]] = {}
        for name, times in self._times.items():
            for line in self._lines.get(name, ()):
                match = _COLLECTIVE.search(line)
                if not match or not (axes := _axes(line, mesh_shape)):
                    continue
                kind, channel = match[2], re.search(r"channel_id=(\d+)", line)
                key = (kind, channel[1] if channel else line)  # parts of one collective share a channel
                if key not in calls or times < calls[key][0]:
                    ways = math.prod(mesh_shape[axis] for axis in axes)
                    calls[key] = (times, axes, _collective_bytes(match[1], kind, match[3] is not None, ways))

        totals = collections.defaultdict[tuple[str, tuple[str, ...], str, bool], list[int]](lambda: [0, 0])
        for (kind, _), (times, axes, sizes) in calls.items():
            for dtype, size in sizes.items():
                total = totals[kind, axes, dtype, times > 1]
                total[0] += size * times
                total[1] += times
        rows = [Collective(*key[:3], size, count, key[3]) for key, (size, count) in totals.items()]
        return sorted(rows, key=lambda row: -row.bytes)


def _collective_bytes(shape: str, kind: str, is_start: bool, ways: int) -> dict[str, int]:
    """Returns `Collective.bytes` by dtype, for a collective whose result has this shape."""
    arrays = _arrays_of(_CONTEXT.sub("", shape) if kind == "collective-permute" else shape)
    if is_start and kind != "all-reduce":  # the result is (inputs, outputs)
        arrays = arrays[len(arrays) // 2 :]
    totals = collections.Counter[str]()
    for dtype, sizes in arrays:
        if dtype in BYTES:
            totals[dtype] += bytes_of(dtype, sizes) * (ways if kind == "reduce-scatter" else 1)
    return totals


def _axes(line: str, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which a collective communicates."""
    group = _first_group(line, math.prod(mesh_shape.values()))
    coordinates = np.unravel_index(np.array(group), tuple(mesh_shape.values()))
    return tuple(axis for axis, places in zip(mesh_shape, coordinates) if len(set(places.tolist())) > 1)


def _first_group(line: str, devices: int) -> Sequence[int]:
    """Parses the first group of `replica_groups` (or the first pair of a permutation), in all notations of XLA."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line):
        return _ints(explicit[1])
    if iota := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", line):
        return list(map(int, _numbers(iota[3], iota[4]).reshape(-1, int(iota[2]))[0]))
    if mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? ?\{{([^}}]*)\}}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        along = re.findall(r"'(\w+)'", mesh[4])
        numbers = _numbers(mesh[2] or str(devices), mesh[3]).reshape(tuple(sizes.values()))
        last = np.moveaxis(numbers, [list(sizes).index(name) for name in along], range(-len(along), 0))
        return list(map(int, last.reshape(-1, math.prod(sizes[name] for name in along))[0]))
    if "replica_groups={}" in line:
        return range(devices)
    raise ValueError(f"unknown notation of replica groups: {line[:500]}")


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [4,2]T(1,0): 0, 1, ..., 7 in this shape, transposed


def _numbers(shape: str, order: str | None) -> np.ndarray:
    numbers = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return (numbers.transpose(_ints(order)) if order else numbers).ravel()
