"""What is known about the hardware."""

import os

# Peak dense bfloat16 FLOP/s of one JAX device, by the start of `device.device_kind` (vendors' data sheets).
# A TPU v2 or v3 device is one TensorCore, half a chip. Longer names first: "TPU v5" is a v5p.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
}


def available_cores() -> int:
    """CPU cores that this process may use; a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_flops(device) -> float | None:
    """Peak FLOP/s of a device, or None where it is not known (a CPU, say)."""
    return next((peak for kind, peak in PEAK_FLOPS.items() if device.device_kind.startswith(kind)), None)
