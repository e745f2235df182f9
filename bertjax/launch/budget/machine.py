"""Measures how fast the devices of a run multiply matrices, and reads how much memory they have."""

import time

import jax
import jax.numpy as jnp

from bertjax.distributed.mesh import compute_for
from bertjax.distributed.topology import available_cores
from bertjax.launch.budget.choice import Machine
from bertjax.training.monitoring.memory import usable_memory

MEASURED_SECONDS = 0.3
SIZES = {"cpu": 768}  # rows and columns of the matrices, by platform
SIZE_ON_ACCELERATORS = 8192


def measure() -> Machine:
    """Returns the machine of this process. The products of `MEASURED_SECONDS` have the type that training uses."""
    device = jax.local_devices()[0]
    size = SIZES.get(device.platform, SIZE_ON_ACCELERATORS)
    matrix = jnp.ones((size, size), compute_for("auto", device).product_dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(matrix))  # compiles
    began, products = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < MEASURED_SECONDS or not products:
        jax.block_until_ready(product(matrix))
        products += 1
    of_device = 2 * size**3 * products / seconds
    return Machine(
        platform=device.platform,
        name=device.device_kind,
        devices=jax.device_count(),
        cores=available_cores(),
        memory=usable_memory(device),
        flops=of_device * jax.device_count(),
    )
