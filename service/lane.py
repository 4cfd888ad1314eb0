"""Threads that work beside the event loop, how much may wait for them, and whose turn it is. Knows nothing of the work.

Tenants take turns, a job each, and a tenant never has all threads: whoever sends more than its share waits only for its
own jobs. A job cannot be interrupted, so turns alone would have others wait until a long one ends.
"""

import asyncio
import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.service.errors import Reason, ServiceError

_BYTES_PER_JOB = 1024
"""What waiting costs besides the input."""

T = TypeVar("T")
_Job = Callable[[], Any]


class Lane:
    """A few threads with a queue for each tenant, which refuse more than they can hold. ``run`` is for the event loop.

    A tenant may have as much as is still free: one alone fills half of the room, and leaves the other half to others.
    """

    def __init__(self, name: str, num_threads: int, max_waiting_bytes: int, *, threads_per_tenant: int = 1) -> None:
        """``threads_per_tenant``: how many of the threads may work for one tenant at a time."""
        self._threads_per_tenant = threads_per_tenant
        self._num_running: Counter[str] = Counter()
        """Jobs that have begun and not ended, by tenant. The lock's."""
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes: Counter[str] = Counter()
        """By tenant; what is being worked at included."""
        self._queues: dict[str, dict[Future[Any], _Job]] = {}
        """By tenant, without empty ones; whose turn it is comes first. The lock's."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], num_bytes: int, tenant: str) -> T:
        """Runs ``work`` in a thread, when it is the tenant's turn; ``num_bytes`` is how much input it holds while it
        waits.

        Raises what ``work`` raises, and ServiceError PREPARATION_FULL. Work that has begun goes on when its caller is
        cancelled; any other is dropped.
        """
        num_bytes += _BYTES_PER_JOB
        total = self._waiting_bytes.total()
        if total and self._waiting_bytes[tenant] + num_bytes > self._max_waiting_bytes - total:
            raise ServiceError(Reason.PREPARATION_FULL)
        self._waiting_bytes[tenant] += num_bytes
        done: Future[T] = Future()
        done.add_done_callback(functools.partial(self._release, asyncio.get_running_loop(), tenant, num_bytes))
        with self._lock:
            self._queues.setdefault(tenant, {})[done] = work
        self._threads.submit(self._do_jobs)
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done, work  # an error's traceback has this frame, and ``done`` has the error: a circle

    def close(self) -> None:
        """Ends the threads; work that has not begun is cancelled, and nothing is waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [done for queue in self._queues.values() for done in queue]
        for done in waiting:
            done.cancel()

    def _do_jobs(self) -> None:
        """In a thread, until there is no job that may begin: each one that ends may let another begin."""
        while (job := self._next_job()) is not None:
            tenant, done, work = job
            del job
            try:
                if done.set_running_or_notify_cancel():
                    _work(done, work)
            finally:
                del done, work  # while this thread is idle its frame would hold the last job's input
                with self._lock:
                    self._num_running[tenant] -= 1
                    if not self._num_running[tenant]:
                        del self._num_running[tenant]

    def _next_job(self) -> tuple[str, Future[Any], _Job] | None:
        """Takes the job whose turn it is out of its queue."""
        with self._lock:
            free = (name for name in self._queues if self._num_running[name] < self._threads_per_tenant)
            tenant = next(free, None)
            if tenant is None:
                return None
            queue = self._queues.pop(tenant)
            done = next(iter(queue))
            work = queue.pop(done)
            if queue:
                self._queues[tenant] = queue  # behind the others
            self._num_running[tenant] += 1
            return tenant, done, work

    def _release(self, loop: asyncio.AbstractEventLoop, tenant: str, num_bytes: int, done: Future[Any]) -> None:
        if done.cancelled():
            self._drop(tenant, done)
        # Called by the thread that did the work; the count belongs to the loop, which may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._give_back, tenant, num_bytes)

    def _drop(self, tenant: str, done: Future[Any]) -> None:
        """What it holds is free before its turn would come: else whoever cancels at once could fill the memory."""
        with self._lock:
            queue = self._queues.get(tenant, {})
            queue.pop(done, None)
            if not queue:
                self._queues.pop(tenant, None)

    def _give_back(self, tenant: str, num_bytes: int) -> None:
        self._waiting_bytes[tenant] -= num_bytes
        if not self._waiting_bytes[tenant]:
            del self._waiting_bytes[tenant]


def _work(done: Future[T], work: Callable[[], T]) -> None:
    """A panic of the tokenizer's library is no Exception; here it becomes one, so that it fails one request as any
    error does."""
    try:
        result = work()
    except Exception as error:
        done.set_exception(error)
        del done  # or this frame and the error's traceback would be a circle
    except BaseException as panic:
        failure = RuntimeError(f"the tokenizer's library panicked: {panic}")
        failure.__cause__ = panic
        done.set_exception(failure)
        del done, failure
    else:
        done.set_result(result)
