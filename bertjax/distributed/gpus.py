"""Hardware data of NVIDIA GPUs, and descriptions of machines with GPUs to compile for without the hardware."""

import dataclasses
import importlib.util
import os
from typing import Any, ClassVar

from bertjax.common.errors import UserError

GIB = 1 << 30

# Dense bfloat16 (T4, V100: float16) peak FLOP/s, by prefix of `device.device_kind` (data sheets); longer ones first.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, according to its data sheet and the table of compute capabilities in the CUDA C++ Programming Guide."""

    devices_per_chip: ClassVar[int] = 1
    kind: str  # `device.device_kind`
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a multiprocessor
    clock: float  # boost, cycles/s
    memory_bytes: float  # according to CUDA
    bandwidth: float  # bytes/s of the memory
    cache_bytes: int  # L2
    shared_bytes: int  # shared memory of a multiprocessor
    threads: int  # resident threads of a multiprocessor
    link: float  # bytes/s to the other GPUs of its machine, each way: NVLink, or PCIe
    network: float  # bytes/s to other machines, each way: the share of a GPU in a usual machine
    per_machine: int = 8

    @property
    def peak_flops(self) -> float:
        """The peak FLOP/s of matrix products."""
        return next(peak for prefix, peak in PEAK_FLOPS.items() if self.kind.startswith(prefix))

    @property
    def vector_rate(self) -> float:
        """The largest number of operations/s outside of the matrix units.

        In a cycle, each of the four schedulers of a multiprocessor issues an instruction for 32 threads. An instruction
        does at most a multiplication and an addition (CUDA C++ Programming Guide, "Multiprocessor Level").
        """
        return self.cores * 4 * 32 * 2 * self.clock

    @property
    def hbm_bytes(self) -> float:
        """The memory that JAX reserves: three quarters, or the share in the environment variable of the user."""
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        name, share = next(((name, value) for name in names if (value := os.environ.get(name))), ("", "0.75"))
        try:
            return self.memory_bytes * float(share)
        except ValueError:
            raise UserError(f"{name}={share}: must be a number, the share of a GPU's memory that JAX takes") from None

    def target_config(self) -> str:
        """Returns the hardware data for XLA, a GpuTargetConfigProto as text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_bytes} shared_memory_per_block_optin: {self.shared_bytes - 1024}
              threads_per_core_limit: {self.threads} core_count: {self.cores} fpus_per_core: {self.lanes}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.cache_bytes}
              clock_rate_ghz: {self.clock / 1e9} device_memory_size: {self.memory_bytes:.0f}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 9 patch: 0 }} device_description_str: "{self.kind}"
        """


# Memory: from messages of PyTorch and JAX. NVLink: white papers of A100 and H100, data sheet of HGX B200. Network: the
# eight adapters of DGX A100 (200 Gb/s), H100, H200 and B200 (400 Gb/s). Machines with L4 and L40S differ most: here
# eight GPUs share the network of AWS's g6.48xlarge and g6e.48xlarge (100 and 400 Gb/s).
GPUS = {
    "a100-40": Gpu(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41e9, 39.39 * GIB, 1555e9, 40 << 20, 164 << 10, 2048, 300e9, 25e9
    ),
    "a100-80": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41e9, 79.14 * GIB, 2039e9, 40 << 20, 164 << 10, 2048, 300e9, 25e9
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98e9, 79.1 * GIB, 3352e9, 50 << 20, 228 << 10, 2048, 450e9, 50e9
    ),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98e9, 139.8 * GIB, 4800e9, 50 << 20, 228 << 10, 2048, 450e9, 50e9),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04e9, 22.05 * GIB, 300e9, 48 << 20, 100 << 10, 1536, 32e9, 1.56e9),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 2.52e9, 44.4 * GIB, 864e9, 96 << 20, 100 << 10, 1536, 32e9, 6.25e9),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 148, 128, 1.965e9, 178.3 * GIB, 7700e9, 126 << 20, 228 << 10, 2048, 900e9, 50e9
    ),
}


@dataclasses.dataclass(frozen=True)
class Machines:
    """`chips` GPUs of one kind in `hosts` equal machines. `topology.Accelerator` describes TPUs."""

    platform: ClassVar[str] = "gpu"
    slices: ClassVar[int] = 1  # any axis of the mesh may span machines
    name: str
    generation: Gpu
    chips: int
    hosts: int

    # Otherwise the compiler would time kernels on the GPU.
    compiler_options: ClassVar[dict[str, Any]] = {"xla_gpu_autotune_level": "0"}

    @property
    def description(self) -> str:
        """The name and the size, for a heading."""
        return f"{self.name}: {self.chips} GPUs" + (f" in {self.hosts} machines" if self.hosts > 1 else "")

    def devices(self) -> list[Any]:
        """Returns JAX devices to compile for. Raises `UserError` if JAX's CUDA plugin is not installed."""
        if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
            raise UserError(
                "jax[cuda12] is not installed: pip install 'bertjax[aot-cuda]' (5 GB; it needs Linux, but no GPU)"
            )
        from bertjax.distributed import compile_only_gpu

        topology = f"1x{self.hosts}x{self.chips // self.hosts}"
        return compile_only_gpu.compile_only_devices(self.generation.target_config(), topology)


def machines(name: str, hosts: int = 1) -> Machines | None:
    """Parses a name of `GPUS` and a number, such as "h100-8"; returns None if the name is not in `GPUS`.

    Raises `UserError` if the machines cannot have this number of GPUs.
    """
    prefix, _, number = (f"{name}-1" if name in GPUS else name).rpartition("-")
    gpu = GPUS.get(prefix)
    if gpu is None:
        return None
    if not number.isdecimal() or int(number) < 1:
        raise UserError(f"--topology={name}: unknown; choose {prefix}-N for N GPUs, such as {prefix}-8")
    if hosts < 1 or int(number) % hosts:
        raise UserError(f"--hosts={hosts}: must divide the {number} GPUs of --topology={name}")
    if int(number) // hosts > gpu.per_machine:
        raise UserError(
            f"--topology={name}: a machine has at most {gpu.per_machine} GPUs; add --hosts=M for M machines"
        )
    return Machines(name, gpu, int(number), hosts)
