"""Prepares JAX to compile for a GPU on a machine without a GPU.

The platform "gpu" stands for CUDA, ROCm or oneAPI. JAX reads the meaning from the devices of the machine when it lowers
a program (jax-ml/jax#23971), and raises an error if there are no devices. In this case "gpu" is set to CUDA.
"""

import os
from typing import Any

from jax._src import xla_bridge
from jax.experimental import topologies


def compile_only_devices(target_config: str, topology: str) -> list[Any]:
    """Returns JAX devices that do not exist.

    Args:
      target_config: the hardware data of a GPU for XLA, a GpuTargetConfigProto as text.
      topology: slices x machines x GPUs of a machine, such as "1x2x8".
    """
    # Otherwise the plugin searches for a driver when it is loaded.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns that there is no GPU
    gpus = topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=topology).devices
    canonicalize = xla_bridge.canonicalize_platform
    try:
        canonicalize("gpu")
    except RuntimeError:
        xla_bridge.canonicalize_platform = lambda platform: "cuda" if platform == "gpu" else canonicalize(platform)
    return list(gpus)
