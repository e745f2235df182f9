"""Streams between host and devices: batches arrive ahead of their use, results are fetched behind it."""

import collections
import contextlib
from collections.abc import Iterable, Iterator

import jax
from jax.sharding import Mesh

from bertjax.distributed.mesh import put_batch

STEPS_IN_FLIGHT = 2  # steps that the host may run ahead of the devices


def on_devices(batches: Iterator[dict], mesh: Mesh) -> Iterator[dict]:
    """Copies this host's rows of batches to the devices, one step ahead of their use."""
    ahead = collections.deque()
    with contextlib.closing(batches):
        for batch in batches:
            ahead.append(put_batch(batch, mesh))
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead


def fetched(results: Iterable) -> Iterator:
    """Fetches results in order, the first once `STEPS_IN_FLIGHT` more are under way, so that no device waits for us."""
    in_flight = collections.deque()
    for result in results:
        in_flight.append(result)
        if len(in_flight) > STEPS_IN_FLIGHT:
            yield jax.device_get(in_flight.popleft())
    yield from map(jax.device_get, in_flight)
