"""Transfers of batches to the devices ahead of their use, and of results back to the host."""

import jax.numpy as jnp
import numpy as np

from bertjax.distributed.transfers import STEPS_IN_FLIGHT, copy_to_devices, fetch_results
from tests.conftest import one_device_mesh, tiny_config


def test_results_are_fetched_in_order_and_asynchronously():
    started = []

    def results():
        for number in range(7):
            started.append(number)
            yield {"x": jnp.full(2, number)}

    seen = []
    for number, result in enumerate(fetch_results(results())):
        assert isinstance(result["x"], np.ndarray) and (result["x"] == number).all()
        seen.append(len(started))
    assert seen == [min(7, number + 1 + STEPS_IN_FLIGHT) for number in range(7)]


def test_batches_are_on_the_devices_one_step_ahead_and_the_reader_is_closed():
    read, closed = [], []

    def batches():
        try:
            for number in range(5):
                read.append(number)
                yield {"x": np.full(4, number)}
        finally:
            closed.append(True)

    stream = copy_to_devices(batches(), one_device_mesh(tiny_config()))
    assert int(next(stream)["x"][0]) == 0 and read == [0, 1]
    assert int(next(stream)["x"][0]) == 1 and read == [0, 1, 2]
    stream.close()
    assert closed and read == [0, 1, 2]
