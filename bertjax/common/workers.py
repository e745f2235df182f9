"""Worker processes that Ctrl-C does not reach, and their results in order."""

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker

from bertjax.common.errors import UserError

# Queues whose thread is not waited for. It must not be the last to hold their semaphores: if Python ends while that
# thread removes one, the resource tracker prints a warning. Kept here, the main thread removes them at exit.
_abandoned: list = []


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """A process pool that kills its workers on an error. They end by themselves if this process is killed.

    Spawns the workers, because forking is unsafe with JAX's threads. Raises `UserError` if one of them dies.
    """
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker)
    try:
        with _holding_interrupts():
            for _ in range(workers):  # each submission starts a worker while none is idle
                pool.submit(int)
        yield pool
    except BaseException as error:  # do not wait for unfinished work
        for process in list((pool._processes or {}).values()):
            with contextlib.suppress(ProcessLookupError):  # Python's own thread saw it end just now
                process.kill()
        # Python's thread then shuts the pool down. It must wait neither for work that nobody reads any more (it does
        # before 3.11.5) nor for the rest of a result. The pipe of the work is its own to close: two that do are a race.
        pool._call_queue.cancel_join_thread()
        _abandoned.append(pool._call_queue)
        pool._result_queue._writer.close()
        if isinstance(error, concurrent.futures.process.BrokenProcessPool):
            raise UserError("a worker process died, probably out of memory; try fewer --workers") from None
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked until now, see `_holding_interrupts`
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


@contextlib.contextmanager
def _holding_interrupts() -> Iterator[None]:
    """Blocks SIGINT while workers start, so that they inherit this: a terminal sends Ctrl-C to all processes.

    This process answers a Ctrl-C or SIGTERM of that time afterwards, also one that another of its threads receives: in
    the middle of a start, it would leave a worker that reads half of what it needs. Workers ignore Ctrl-C for good from
    `_start_worker` on.
    """
    if threading.current_thread() is not threading.main_thread():  # the main thread would receive it all the same
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal when it starts with the first worker
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in heard:
            signal.raise_signal(number)


def in_order(pool, function: Callable, items: Iterable, ahead: int) -> Iterator:
    """Yields `function(item)` in order, with at most `ahead` items submitted at a time."""
    running = collections.deque()
    for item in items:
        running.append(pool.submit(function, item))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
