"""Hardware data, and descriptions of TPU topologies to compile for without the hardware."""

import contextlib
import dataclasses
import glob
import importlib.util
import os
from typing import TYPE_CHECKING, Any, ClassVar

from bertjax.common.errors import UserError
from bertjax.distributed import gpus
from bertjax.distributed.gpus import GIB, GPUS, PEAK_FLOPS, Machines

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of TPUs."""

    kind: str  # prefix of `device.device_kind`
    libtpu_name: str
    counts_cores: bool  # gcloud's number counts TensorCores (two per chip) instead of chips
    devices_per_chip: int  # JAX devices: one per TensorCore, or one per chip whose cores act as one
    peak_flops: float  # dense bfloat16 FLOP/s per chip (data sheets)
    hbm_bytes: float  # memory per chip that the compiler may use, according to its out-of-memory errors
    hbm_bandwidth: float  # bytes/s per chip (data sheets)
    clock: float  # cycles/s of a TensorCore: peak FLOP/s / FLOPs of its matrix units per cycle
    dimensions: int  # dimensions of the network: 2 or 3
    chips: tuple[int, ...]  # slice sizes that gcloud offers


_PLANES = (1, 4, 8, 16, 32, 64, 128, 256)
_CUBES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Keys: gcloud's accelerator names without the number.
GENERATIONS = {
    "v2": Generation("TPU v2", "v2", True, 2, 45e12, 2 * 7.48 * GIB, 700e9, 0.69e9, 2, (4, 16, 64, 128, 256)),
    "v3": Generation(
        "TPU v3", "v3", True, 2, 123e12, 2 * 15.48 * GIB, 900e9, 0.94e9, 2, (4, 16, 32, 64, 128, 256, 512, 1024)
    ),
    "v4": Generation("TPU v4", "v4", True, 1, 275e12, 30.75 * GIB, 1228e9, 1.05e9, 3, _CUBES),
    "v5litepod": Generation("TPU v5 lite", "v5e", False, 1, 197e12, 15.75 * GIB, 819e9, 1.5e9, 2, _PLANES),
    "v5p": Generation("TPU v5", "v5p", True, 1, 459e12, 95.74 * GIB, 2765e9, 1.75e9, 3, (*_CUBES, 4096)),
    "v6e": Generation("TPU v6 lite", "v6e", False, 1, 918e12, 31.25 * GIB, 1638e9, 1.75e9, 2, _PLANES),
    "tpu7x": Generation("TPU7x", "tpu7x", True, 2, 2307e12, 2 * 94.75 * GIB, 7380e9, 2.2e9, 3, (*_CUBES, 4096)),
}


def available_cores() -> int:
    """Returns the number of CPU cores that this process may use; a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> float:
    """Returns the bytes of memory of this host, or of the container that this process runs in."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUPS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # absent, or "max"
            sizes.append(int(file.read()))
    return float(min(sizes))


# Flags of processors (/proc/cpuinfo) that multiply bfloat16 faster than float32 with YNNPACK.
BFLOAT16_FLAGS = {
    "amx_bf16",  # Intel since Sapphire Rapids: 1.7-1.8 against 0.27-0.36 TFLOP/s on two cores
    "avx512_bf16",  # AMD since Zen 4: 0.36-0.42 against 0.20-0.21 TFLOP/s on two cores
}


def cpu_dtype() -> str:
    """Returns the dtype in which the processor of this machine multiplies fastest."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split() for line in file if line.startswith("flags")), [])
    except OSError:  # not Linux
        flags = []
    return "bfloat16" if BFLOAT16_FLAGS.intersection(flags) else "float32"


def has_accelerator() -> bool:
    """Returns whether this machine has a TPU or a GPU, without initializing JAX's devices."""
    return any(glob.glob(f"/dev/{name}") for name in ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd"))


def peak_flops(device: "jax.Device") -> float | None:
    """Returns the peak FLOP/s of a JAX device; None if unknown, as for CPUs."""
    peaks = {tpu.kind: tpu.peak_flops / tpu.devices_per_chip for tpu in GENERATIONS.values()} | PEAK_FLOPS
    prefixes = [prefix for prefix in peaks if device.device_kind.startswith(prefix)]
    return peaks[max(prefixes, key=len)] if prefixes else None  # "TPU v5 lite" starts with "TPU v5", the kind of a v5p


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """An accelerator type of gcloud: `chips` of one generation in total, in `slices` of equal size."""

    platform: ClassVar[str] = "tpu"
    compiler_options: ClassVar[dict[str, Any]] = {}
    name: str
    generation: Generation
    chips: int  # chips of all slices together
    slices: int

    @property
    def description(self) -> str:
        """The name and the size, for a heading."""
        return f"{self.name}{f', {self.slices} slices' if self.slices > 1 else ''}: {self.chips} chips"

    @property
    def shape(self) -> tuple[int, ...]:
        """The chips of a slice along each dimension of the network: 2x4, 2x2x1, 2x2x4, 4x4x8, ..."""
        power, dimensions = (self.chips // self.slices).bit_length() - 1, self.generation.dimensions
        sizes = [1 << (power + i) // dimensions for i in range(dimensions)]
        return tuple(sorted(sizes, key=lambda size: size == 1))

    def devices(self) -> list[Any]:
        """Returns JAX devices to compile for. Raises `UserError` if libtpu is not installed."""
        if importlib.util.find_spec("libtpu") is None:
            raise UserError("libtpu is not installed: pip install 'bertjax[aot]' (it needs Linux, but no TPU)")
        # Without these variables, libtpu queries the metadata of the machine, and logs errors.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", self.name)
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # safe: no TPU is used

        from jax.experimental import topologies

        options: dict[str, Any] = {}
        if self.generation.libtpu_name in ("v4", "v5p"):
            options["chip_config_name"] = "megacore"
        if self.chips == self.slices:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        name = f"{self.generation.libtpu_name}:{'x'.join(map(str, self.shape))}"
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)


def accelerator(name: str, slices: int = 1, hosts: int = 1) -> Accelerator | Machines:
    """Parses gcloud's name of a TPU, such as "v5litepod-16", or a name of GPUs, such as "h100-8".

    Raises `UserError` with the known names if the name is unknown.
    """
    machines = gpus.machines(name, hosts)
    if machines is not None:
        if slices != 1:
            raise UserError(f"--slices={slices}: GPUs have no slices; set the number of machines with --hosts=M")
        return machines
    prefix, _, number = name.rpartition("-")
    generation = GENERATIONS.get(prefix)
    if generation is None:
        known = ", ".join(f"{prefix}-N" for prefix in GENERATIONS)
        raise UserError(
            f"--topology={name}: unknown; choose one of {known} (TPUs, such as v5litepod-16), or N GPUs: "
            + ", ".join(f"{prefix}-N" for prefix in GPUS)
        )
    per_chip = 2 if generation.counts_cores else 1
    if number not in (str(chips * per_chip) for chips in generation.chips):
        known = ", ".join(f"{prefix}-{chips * per_chip}" for chips in generation.chips)
        raise UserError(f"--topology={name}: unknown; choose one of {known}")
    if slices < 1:
        raise UserError(f"--slices={slices}: must be at least 1")
    if hosts != 1:
        raise UserError(f"--hosts={hosts}: only for GPUs; the name of a TPU determines the number of hosts")
    return Accelerator(name, generation, int(number) // per_chip * slices, slices)
