"""Parses the text of a compiled program: its instructions, the compiler's cycle estimates, kernels and collectives."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

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
_CONTEXT = re.compile(r"\bu32\[\]")  # what a TPU keeps of a transfer that goes on
_NAMED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of a step that have the same kind, mesh axes, type and loop status, added up."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices communicate
    dtype: str
    bytes: int  # per step: of whole arrays that are gathered or summed, of a device's part that is exchanged
    count: int  # collectives per step
    in_loop: bool  # inside a loop over layers or microbatches


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of ours (Pallas), about which the compiler knows nothing."""

    name: str
    bytes: int  # bytes that one call reads and writes
    times: int = 1  # calls per step


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the compiler estimates of an instruction, with what the instruction does; a fusion is one."""

    operation: str  # its `op_name`: the path of modules and functions that it comes from; "" if unknown
    cycles: int
    flops: int  # matrix products only
    bytes: int  # read from HBM and written to it
    times: int  # per step


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str  # an array's, or (...) of several
    opcode: str
    operands: tuple[str, ...]  # their names
    attributes: str
    line: str
    is_root: bool

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the type and the sizes of each array of the shape."""
        return [(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in _ARRAY.findall(self.shape)]

    @property
    def bytes(self) -> int:
        return sum(_bytes(self.shape).values())

    @property
    def called(self) -> str | None:
        """The computation that it calls."""
        found = _CALLED.search(self.attributes)
        return found and found[1]


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    return BYTES.get(dtype, 0) * math.prod(shape)


def instruction_of(line: str) -> Instruction | None:
    """Parses a line; None if it has no instruction."""
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
    """Returns the kernel that an instruction calls; None if it is another instruction."""
    if not (found := _KERNEL.search(line)):
        return None
    size = sum(_bytes(found[1]).values()) + sum(_bytes(found[2]).values())
    for place in _ALIASED.findall(line):  # the result is written over it
        dtype, sizes = _ARRAY.findall(found[2])[int(place)]
        size -= bytes_of(dtype, [*map(int, sizes.split(","))])
    return Kernel(found[3], size)


def operation_of(line: str) -> str:
    """Returns the `op_name` of an instruction, "" if it has none."""
    found = _OPERATION.search(line)
    return found[1] if found else ""


class HloModule:
    """The computations of a compiled program, and how often a step runs each of them."""

    def __init__(self, text: str):
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
        # The minimum over all callers: a collective that is spread over the iterations of a loop counts once.
        if times >= self._times.get(name, math.inf):
            return
        self._times[name] = times
        for line in self._lines.get(name, ()):
            if loop := _WHILE.search(line):
                self._walk(loop[2], times * self._trip_count(loop))
            else:
                for called in _CALLED.findall(line):
                    self._walk(called, times)

    def _trip_count(self, loop: re.Match) -> int:
        """Returns the trip count of a loop: what the compiler knows (for GPUs), or else that of a loop from 0 to a
        constant, such as those of `lax.scan`."""
        if known := _TRIPS.search(loop.string):
            return int(known[1])
        return max(map(int, re.findall(r" constant\((\d+)\)", "\n".join(self._lines[loop[1]]))), default=1)

    def executed(self) -> Iterator[tuple[str, str, int]]:
        """Yields (computation, line, how often a step runs it) of the entry and of the bodies of loops."""
        yield from self._executed(self._entry, 1)

    def _executed(self, name: str, times: int) -> Iterator[tuple[str, str, int]]:
        for line in self._lines.get(name, ()):
            yield name, line, times
            if loop := _WHILE.search(line):
                yield from self._executed(loop[2], times * self._trip_count(loop))

    def computation(self, name: str) -> dict[str, Instruction]:
        """Returns the instructions of a computation by name."""
        if name not in self._parsed:
            found = filter(None, map(instruction_of, self._lines.get(name, ())))
            self._parsed[name] = {instruction.name: instruction for instruction in found}
        return self._parsed[name]

    def estimated_cycles(self) -> int:
        """Sums the compiler's cycle estimates over all instructions; a loop body counts once per iteration."""
        return sum(each.times * each.cycles for each in self.estimates())

    def estimates(self) -> list[Estimate]:
        """Returns those of the instructions of which the compiler estimates the cycles."""
        found = []
        for name, line, times in self.executed():
            if cycles := sum(map(int, _CYCLES.findall(line))):
                instruction = instruction_of(line)
                flops, size = self._flops(name, instruction), self._hbm_bytes(name, instruction)
                found.append(Estimate(operation_of(line), cycles, flops, size, times))
        return found

    def _flops(self, name: str, instruction: Instruction) -> int:
        """Returns the FLOPs of the products in an instruction of a computation and in what it calls."""
        inner = (
            self._flops(called, each)
            for called in _CALLED.findall(instruction.attributes)
            for each in self.computation(called).values()
        )
        flops = sum(inner)
        if instruction.opcode in ("convolution", "dot"):
            # The sizes m k, k n and m n of the factors and the product multiply to the square of m k n.
            shapes = instruction.shape, *self._operand_shapes(name, instruction)[:2]
            flops += 2 * math.isqrt(math.prod(map(_elements, shapes)))
        return flops

    def _hbm_bytes(self, name: str, instruction: Instruction) -> int:
        shapes = instruction.shape, *self._operand_shapes(name, instruction)
        return sum(sum(_bytes(_ON_CHIP.sub("", shape)).values()) for shape in shapes)

    def _operand_shapes(self, name: str, instruction: Instruction) -> list[str]:
        own = self.computation(name)
        return [own[each].shape if each in own else "" for each in instruction.operands]

    def kernels(self) -> list[Kernel]:
        found = ((kernel_of(line), times) for name, times in self._times.items() for line in self._lines.get(name, ()))
        return [dataclasses.replace(kernel, times=times) for kernel, times in found if kernel]

    def collectives(self, mesh_shape: dict[str, int]) -> list[Collective]:
        """Returns the collectives of a step, the largest first."""
        seen: dict[tuple, tuple] = {}
        for name, times in self._times.items():
            for line in self._lines.get(name, ()):
                if not (found := _COLLECTIVE.search(line)):
                    continue
                kind, axes = found[2], _axes(line, mesh_shape)
                if not axes:
                    continue
                channel = re.search(r"channel_id=(\d+)", line)
                key = (kind, channel[1] if channel else line)  # parts of one collective share its channel
                if key not in seen or times < seen[key][0]:
                    ways = math.prod(mesh_shape[axis] for axis in axes)
                    seen[key] = (times, axes, _arrays(found[1], kind, found[3] is not None, ways))

        totals: dict[tuple, list[int]] = {}
        for (kind, _), (times, axes, sizes) in seen.items():
            for dtype, size in sizes.items():
                total = totals.setdefault((kind, axes, dtype, times > 1), [0, 0])
                total[0] += size * times
                total[1] += times
        rows = [Collective(k, axes, dtype, *total, in_loop) for (k, axes, dtype, in_loop), total in totals.items()]
        return sorted(rows, key=lambda row: -row.bytes)


def _arrays(shape: str, kind: str, is_start: bool, ways: int) -> dict[str, int]:
    """Returns the bytes, by type, of the arrays that a collective with this result shape has to do with, see
    `Collective`."""
    halves = is_start and kind != "all-reduce"  # the result is (inputs, outputs)
    if kind == "collective-permute":
        shape = _CONTEXT.sub("", shape)
    return {dtype: size * (ways if kind == "reduce-scatter" else 1) for dtype, size in _bytes(shape, halves).items()}


def _bytes(shape: str, second_half: bool = False) -> dict[str, int]:
    """Returns the bytes, by type, of the arrays of a shape, or of their second half."""
    arrays = [(dtype, math.prod(map(int, filter(None, sizes.split(","))))) for dtype, sizes in _ARRAY.findall(shape)]
    totals: dict[str, int] = {}
    for dtype, size in arrays[len(arrays) // 2 :] if second_half else arrays:
        if dtype in BYTES:
            totals[dtype] = totals.get(dtype, 0) + size * BYTES[dtype]
    return totals


def _elements(shape: str) -> int:
    return sum(math.prod(map(int, filter(None, sizes.split(",")))) for _, sizes in _ARRAY.findall(shape))


def _axes(line: str, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which a collective communicates."""
    group = _first_group(line, math.prod(mesh_shape.values()))
    coordinates = np.unravel_index(np.array(group), tuple(mesh_shape.values()))
    return tuple(axis for axis, places in zip(mesh_shape, coordinates) if len(set(places.tolist())) > 1)


def _first_group(line: str, devices: int) -> Sequence[int]:
    """Parses the first of `replica_groups` (or of a permutation's pairs), in any of XLA's notations."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line):
        return _ints(explicit[1])
    if iota := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", line):
        return _numbers(iota[3], iota[4]).reshape(-1, int(iota[2]))[0].tolist()
    if mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? ?\{{([^}}]*)\}}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        along = re.findall(r"'(\w+)'", mesh[4])
        numbers = _numbers(mesh[2] or str(devices), mesh[3]).reshape(tuple(sizes.values()))
        last = np.moveaxis(numbers, [list(sizes).index(name) for name in along], range(-len(along), 0))
        return last.reshape(-1, math.prod(sizes[name] for name in along))[0].tolist()
    if "replica_groups={}" in line:
        return range(devices)
    raise ValueError(f"unknown notation of replica groups: {line[:500]}")


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [4,2]T(1,0): 0, 1, ..., 7 in that shape, transposed


def _numbers(shape: str, order: str | None) -> np.ndarray:
    numbers = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return (numbers.transpose(_ints(order)) if order else numbers).ravel()


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def total_bytes(collectives: Iterable[Collective], **fields) -> int:
    """Sums the bytes of the collectives whose fields have the given values."""
    return sum(c.bytes for c in collectives if all(getattr(c, name) == value for name, value in fields.items()))
