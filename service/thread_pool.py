"""A thread pool beside the event loop, fair between tenants and with bounded queues. Knows nothing about the work.

Tenants take turns, one job each, and no tenant gets all threads: a tenant that sends more than its share waits only for
its own jobs. Turns are not enough, because a job cannot be interrupted: other tenants would wait for the end of a long
one. A job that waits for another process lets the next one run meanwhile.
"""

import asyncio
import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.models.executor.priority import lower_priority
from penstock.service.errors import Reason, ServiceError

_BYTES_PER_JOB = 1024
"""Memory of a waiting job besides its input."""

_current = threading.local()
"""This thread's pool (``lane``), and the ``tenant`` of its current job."""

T = TypeVar("T")
_Job = Callable[[], Any]


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Lets another job run while this one waits for another process. Does nothing outside a pool's threads."""
    lane: FairThreadPool | None = getattr(_current, "lane", None)
    if lane is None:
        yield
        return
    lane.pause(_current.tenant)
    try:
        yield
    finally:
        lane.resume(_current.tenant)


class FairThreadPool:
    """A few threads with one bounded queue per tenant. ``run`` is for the event loop.

    A tenant may hold as much as is still free: a single tenant fills half of the room, and the other half stays free.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_waiting_bytes: int,
        *,
        threads_per_tenant: int = 1,
        num_giving_way: int = 0,
        is_background: bool = False,
    ) -> None:
        """``threads_per_tenant``: the maximum number of threads that work for one tenant at a time.
        ``num_giving_way``: the maximum number of jobs that wait for other processes, besides ``num_threads`` that
        work. ``is_background``: the threads have a low priority, because other threads run meanwhile: a job must not
        hold the interpreter's lock for long."""
        self._num_threads = num_threads
        self._threads_per_tenant = threads_per_tenant
        self._max_jobs = num_threads + num_giving_way
        self._jobs: Counter[str] = Counter()
        """Jobs that have started and not ended, by tenant. Guarded by the lock."""
        self._working: Counter[str] = Counter()
        """The same without jobs that wait for another process. Guarded by the lock."""
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes: Counter[str] = Counter()
        """Input held by tenant, including that of running jobs."""
        self._queues: dict[str, dict[Future[Any], _Job]] = {}
        """Waiting jobs by tenant, without empty queues, in the order of turns. Guarded by the lock."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(
            self._max_jobs, thread_name_prefix=name, initializer=lower_priority if is_background else None
        )

    async def run(self, work: Callable[[], T], num_bytes: int, tenant: str) -> T:
        """Runs ``work`` in a thread when it is the tenant's turn. ``num_bytes`` is the size of the input that it holds
        while it waits.

        Raises what ``work`` raises, and ServiceError PREPARATION_FULL. If the caller is cancelled, work that has
        started continues, and other work is dropped.
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
            self._wake_thread()
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done, work  # an error's traceback has this frame, and ``done`` has the error: a reference cycle

    def close(self) -> None:
        """Ends the threads without waiting. Work that has not started is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [done for queue in self._queues.values() for done in queue]
            self._queues.clear()  # a thread could start one of them before it is cancelled
        for done in waiting:
            done.cancel()

    def pause(self, tenant: str) -> None:
        """Lets the next job start. Called in a thread whose job waits for another process."""
        with self._lock:
            _count_down(self._working, tenant)
            self._wake_thread()

    def resume(self, tenant: str) -> None:
        """Counts the job as working again, besides the one that started. Called in the same thread."""
        with self._lock:
            self._working[tenant] += 1

    def _wake_thread(self) -> None:
        """Makes a thread look for a job if one may start. The lock is held."""
        if self._next_tenant() is not None:
            with contextlib.suppress(RuntimeError):  # the pool was closed meanwhile
                self._threads.submit(self._do_jobs)

    def _next_tenant(self) -> str | None:
        """Returns the tenant whose job may start now, if any. The lock is held."""
        free = self._max_jobs - self._jobs.total()
        if free <= 0 or self._working.total() >= self._num_threads:
            return None
        most_jobs = max(free, self._threads_per_tenant)
        for tenant in self._queues:
            if self._working[tenant] < self._threads_per_tenant and self._jobs[tenant] < most_jobs:
                return tenant
        return None

    def _do_jobs(self) -> None:
        """Runs jobs on a thread until none may start. Each job that ends may let others start."""
        _current.lane = self
        while (job := self._take_job()) is not None:
            _current.tenant, done, work = job
            del job
            try:
                if done.set_running_or_notify_cancel():
                    _work(done, work)
            finally:
                del done, work  # or the frame of an idle thread would hold the last job's input
                with self._lock:
                    _count_down(self._working, _current.tenant)
                    _count_down(self._jobs, _current.tenant)

    def _take_job(self) -> tuple[str, Future[Any], _Job] | None:
        """Removes the next job from its queue and returns it; None if none may start."""
        with self._lock:
            tenant = self._next_tenant()
            if tenant is None:
                return None
            queue = self._queues.pop(tenant)
            done = next(iter(queue))
            work = queue.pop(done)
            if queue:
                self._queues[tenant] = queue  # after the others
            self._working[tenant] += 1
            self._jobs[tenant] += 1
            self._wake_thread()  # the end of one job may let two others start
            return tenant, done, work

    def _release(self, loop: asyncio.AbstractEventLoop, tenant: str, num_bytes: int, done: Future[Any]) -> None:
        if done.cancelled():
            self._drop(tenant, done)
        # Called by the thread that did the work. The count belongs to the event loop, which may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_count_down, self._waiting_bytes, tenant, num_bytes)

    def _drop(self, tenant: str, done: Future[Any]) -> None:
        """Frees a cancelled job's input before its turn: otherwise clients that cancel could fill the memory."""
        with self._lock:
            queue = self._queues.get(tenant, {})
            queue.pop(done, None)
            if not queue:
                self._queues.pop(tenant, None)


def _count_down(counts: Counter[str], tenant: str, number: int = 1) -> None:
    counts[tenant] -= number
    if not counts[tenant]:
        del counts[tenant]


def _work(done: Future[T], work: Callable[[], T]) -> None:
    """Runs ``work`` and sets its result. A panic of the tokenizer's library is not an Exception; it becomes one here,
    so that it fails only one request, like any error."""
    try:
        result = work()
    except Exception as error:
        done.set_exception(error)
        del done  # or this frame and the error's traceback would be a reference cycle
    except BaseException as panic:
        failure = RuntimeError(f"the tokenizer's library panicked: {panic}")
        failure.__cause__ = panic
        done.set_exception(failure)
        del done, failure
    else:
        done.set_result(result)
