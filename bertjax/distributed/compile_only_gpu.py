"""What JAX has to be told before it compiles for a GPU that this machine does not have.

Lowering asks which of CUDA, ROCm and oneAPI the platform "gpu" stands for, and JAX looks among the devices that are
there: jax-ml/jax#23971. Where there are none, it raises, so here it is answered: CUDA. Nothing is done where JAX knows.
"""

import os

from jax._src import xla_bridge
from jax.experimental import topologies


def devices(target_config: str, topology: str) -> list:
    """Returns JAX devices that do not exist.

    Args:
      target_config: what XLA is to know of each, a GpuTargetConfigProto as text.
      topology: slices x machines x GPUs of a machine, such as "1x2x8".
    """
    # The plugin would look for a driver where it is loaded.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns that there is no GPU
    found = topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=topology).devices
    answer_for_gpu()
    return found


def answer_for_gpu() -> None:
    """Makes "gpu" mean CUDA to JAX, if it does not know what it means."""
    known = xla_bridge.canonicalize_platform
    try:
        known("gpu")
    except RuntimeError:
        xla_bridge.canonicalize_platform = lambda platform: "cuda" if platform == "gpu" else known(platform)
