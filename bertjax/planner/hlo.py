"""Parses the text of a compiled program for the compiler's cycle estimates and its collectives."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_KERNEL = re.compile(
    r' = (.*?) custom-call\(.*custom_call_target="tpu_custom_call", operand_layout_constraints=(\{.*?\}\}).*?'
    r"(\w+)\)*/pallas_call"
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d+\)[^}]*\}")  # an array whose layout names another memory than HBM
_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of a step that have the same kind, mesh axes, type and loop status, added up."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices communicate
    dtype: str
    bytes: int  # bytes of the whole arrays that are gathered or summed, per step
    count: int  # collectives per step
    in_loop: bool  # inside a loop over layers or microbatches


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of ours, about which the compiler knows nothing."""

    name: str
    bytes: int  # bytes that one call reads and writes
    times: int = 1  # calls per step


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of which the compiler estimates the cycles; a fusion is one."""

    operation: str  # its `op_name`: the path of modules and functions that it comes from; "" if unknown
    cycles: int
    flops: int  # of matrix products
    bytes: int  # that it reads from HBM and writes to it
    times: int  # per step


def kernel_of(line: str) -> Kernel | None:
    """Returns the kernel that an instruction calls; None if it is another instruction."""
    found = _KERNEL.search(line)
    return found and Kernel(found[3], sum(_bytes(found[1]).values()) + sum(_bytes(found[2]).values()))


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
        found = (_INSTRUCTION.match(line) for lines in self._lines.values() for line in lines)
        self._shapes = {each[1]: each[2] for each in found if each}
        self._times: dict[str, int] = {}
        self._walk(self._entry, 1)

    def _walk(self, name: str, times: int) -> None:
        # The minimum over all callers: a collective that is spread over the iterations of a loop counts once.
        if times >= self._times.get(name, math.inf):
            return
        self._times[name] = times
        for line in self._lines.get(name, ()):
            if loop := _WHILE.search(line):
                self._walk(loop[2], times * self._trip_count(loop[1]))
            else:
                for called in _CALLED.findall(line):
                    self._walk(called, times)

    def _trip_count(self, condition: str) -> int:
        """Returns the trip count of a loop from 0 to a constant, such as those of `lax.scan`."""
        return max(map(int, re.findall(r" constant\((\d+)\)", "\n".join(self._lines[condition]))), default=1)

    def estimated_cycles(self) -> int:
        """Sums the compiler's cycle estimates over all instructions; a loop body counts once per iteration."""
        return sum(each.times * each.cycles for each in self.instructions())

    def instructions(self) -> list[Instruction]:
        """Returns the instructions of which the compiler estimates the cycles."""
        return list(self._instructions(self._entry, 1))

    def _instructions(self, name: str, times: int) -> Iterator[Instruction]:
        for line in self._lines.get(name, ()):
            if cycles := sum(map(int, _CYCLES.findall(line))):
                yield Instruction(operation_of(line), cycles, self._flops(line), self._bytes(line), times)
            if loop := _WHILE.search(line):
                yield from self._instructions(loop[2], times * self._trip_count(loop[1]))

    def _flops(self, line: str) -> int:
        """Returns the FLOPs of the products in an instruction and in what it calls."""
        flops = sum(self._flops(each) for called in _CALLED.findall(line) for each in self._lines.get(called, ()))
        found = _INSTRUCTION.match(line)
        if found and found[3] in ("convolution", "dot"):
            # The sizes m k, k n and m n of the factors and the product multiply to the square of m k n.
            shapes = found[2], *(self._shapes.get(name, "") for name in _NAME.findall(found[4])[:2])
            flops += 2 * math.isqrt(math.prod(map(_elements, shapes)))
        return flops

    def _bytes(self, line: str) -> int:
        if not (found := _INSTRUCTION.match(line)):
            return 0
        shapes = found[2], *(self._shapes.get(name, "") for name in _NAME.findall(found[4]))
        return sum(sum(_bytes(_ON_CHIP.sub("", shape)).values()) for shape in shapes)

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
    """Returns the bytes, by type, of the arrays that a collective with this result shape gathers or sums."""
    halves = is_start and kind == "all-gather"  # the result is (inputs, outputs)
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
