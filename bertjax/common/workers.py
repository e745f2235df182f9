"""Worker processes that ignore Ctrl-C, and the results of the workers in order."""

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
from typing import Any, TypeVar

from bertjax.common.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Queues of killed pools. The thread of such a queue is not joined. If the thread held the last reference to a semaphore
# and Python ended meanwhile, the resource tracker would print a warning. The main thread deletes this list at exit.
_abandoned: list[Any] = []


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Context manager: yields a pool of processes. An error in the block kills the workers.

    The workers are spawned, because a fork is unsafe with the threads of JAX. If this process is killed, the workers
    end. Raises `UserError` if a worker dies.
    """
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker)
    try:
        with _holding_interrupts():
            for _ in range(workers):  # each submission starts a worker while no worker is idle
                pool.submit(int)
        yield pool
    except BaseException as error:  # do not wait for unfinished work
        _kill(pool)
        if isinstance(error, concurrent.futures.process.BrokenProcessPool):
            raise UserError("a worker process died, probably out of memory; try fewer --workers") from None
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _kill(pool: Any) -> None:
    """Kills the workers of a pool. The thread of the pool then shuts the pool down."""
    for process in list((pool._processes or {}).values()):
        with contextlib.suppress(ProcessLookupError):  # the process has ended, and the thread of the pool joined it
            process.kill()
    # The thread must wait neither for the queue of calls (as before Python 3.11.5) nor for the rest of a result. Only
    # the thread may close the pipe of the calls.
    pool._call_queue.cancel_join_thread()
    _abandoned.append(pool._call_queue)
    pool._result_queue._writer.close()


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked until now, see `_holding_interrupts`
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _holding_interrupts() -> Iterator[None]:
    """Context manager: blocks SIGINT while workers start. A terminal sends Ctrl-C to all processes.

    The workers inherit the blocked signal, and ignore it later (`_start_worker`). A signal that this process receives
    during the block, in any thread, is raised after the block: in the middle of a start, it would leave a worker with
    half of its input.
    """
    if threading.current_thread() is not threading.main_thread():  # the main thread would receive the signal
        yield
        return
    resource_tracker.ensure_running()  # the tracker would unblock the signal if it started with the first worker
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for received_number in received:
            signal.raise_signal(received_number)


def in_order(
    pool: concurrent.futures.Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Yields `function(item)` for all items in order, with at most `ahead` items submitted at a time."""
    running: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    for item in items:
        running.append(pool.submit(function, item))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
