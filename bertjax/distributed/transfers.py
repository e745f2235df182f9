"""Copies batches to the devices before they are used, and results to the host after more work has started."""

import collections
import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bertjax.distributed.mesh import put_batch

STEPS_IN_FLIGHT = 2  # steps that the host may run ahead of the devices


def copy_to_devices(batches: Iterator[dict[str, np.ndarray]], mesh: Mesh) -> Generator[dict[str, jax.Array]]:
    """Copies the rows of this host to the devices, one step ahead of their use.

    Args:
      batches: the rows of this host of each batch. Closing the result closes the batches.
      mesh: the devices.

    Yields:
      The whole batches, as arrays on all devices.
    """
    ahead: collections.deque[dict[str, jax.Array]] = collections.deque()
    with contextlib.closing(batches):  # type: ignore[type-var]
        for batch in batches:
            ahead.append(put_batch(batch, mesh))
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead


def fetch_results(results: Iterable[Any]) -> Iterator[Any]:
    """Fetches results in order. Fetches a result after `STEPS_IN_FLIGHT` more steps have started.

    So no device waits for the host.

    Args:
      results: trees of arrays on the devices. The iterator starts the computation of a tree when it yields the tree.

    Yields:
      The trees, with arrays on the host.
    """
    in_flight: collections.deque[Any] = collections.deque()
    for result in results:
        in_flight.append(result)
        if len(in_flight) > STEPS_IN_FLIGHT:
            yield jax.device_get(in_flight.popleft())
    yield from map(jax.device_get, in_flight)
