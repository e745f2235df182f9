"""Measures how fast the devices of a run multiply matrices, and reads how much memory they have."""

import time

import jax
import jax.numpy as jnp

from bertjax.distributed.mesh import compute_for
from bertjax.distributed.topology import available_cores
from bertjax.launch.budget.choice import Machine
from bertjax.training.monitoring.memory import usable_memory

MEASURED_SECONDS = 0.3


def measure_machine() -> Machine:
    """Returns the machine of this process.

    The speed is measured for `MEASURED_SECONDS`, on products of square matrices of the dtype that training uses.
    """
    device = jax.local_devices()[0]
    size = 768 if device.platform == "cpu" else 8192
    matrix = jnp.ones((size, size), compute_for("auto", device).product_dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(matrix))  # The first call compiles the product.
    began, products = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < MEASURED_SECONDS or not products:
        jax.block_until_ready(product(matrix))
        products += 1
    return Machine(
        platform=device.platform,
        devices=jax.device_count(),
        cores=available_cores(),
        memory=usable_memory(device),
        flops=2 * size**3 * products / seconds * jax.device_count(),
    )
