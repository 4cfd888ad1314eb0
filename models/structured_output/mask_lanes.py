"""Threads that compute masks: one for which steps wait, and a few with a low priority for slow grammars."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.models.executor.priority import lower_priority
from penstock.models.structured_output.mask_work import RowWork

BACKGROUND_THREADS = 2
RECHECK_S = 0.002
"""The interval between attempts to start work whose grammar is in use, or whose row has unknown tokens."""
STUCK_S = 0.01
"""CPU time of one job after which another thread takes over the jobs after it."""
STUCK_WALL_S = 0.03
"""The same in elapsed time, for jobs that wait or compute on threads of their own."""
SLOW_JOB_S = 0.1
"""Elapsed time after which a stuck job continues at a low priority."""
MAX_STUCK = 4
"""The maximum number of stuck jobs of all tenants. At this number, the jobs after the next stuck one wait."""

T = TypeVar("T")


class WorkerThread:
    """Runs one function after another. Unlike the threads of a pool, it never keeps the process from exiting."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Queues work. Returns a future of its result."""
        done: Future[T] = Future()
        self._work.put((done, work))
        return done

    def _run(self) -> None:
        while True:
            done, work = self._work.get()
            try:
                done.set_result(work())
            except BaseException as error:  # the library's panics are not Exceptions
                done.set_exception(error)


def cpu_time_s(thread: threading.Thread) -> float:
    """Returns the CPU time of a running thread, or the elapsed time if the system does not report CPU time."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    assert thread.ident is not None, "it has started"
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@dataclass(frozen=True)
class MaskJob:
    """A job for which a step waits."""

    tenant: str
    known: threading.Event
    """Set when the job can begin."""
    run: Callable[[], None]
    """Raises nothing."""


class StepLane:
    """Runs the jobs for which steps wait, one after another. While one is stuck, another thread runs those after it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[MaskJob] = deque()
        self._stuck: list[_JobThread] = []
        self._current = _JobThread(self._run)

    def add_jobs(self, jobs: Iterable[MaskJob]) -> None:
        with self._changed:
            self._jobs += jobs
            self.relieve()
            self._changed.notify_all()

    def relieve(self) -> None:
        """Replaces the thread if it is stuck and jobs are waiting."""
        with self._changed:
            if self._jobs and len(self._stuck) < MAX_STUCK and self._current.is_stuck():
                self._stuck.append(self._current)
                self._current = _JobThread(self._run)
            for stuck in self._stuck:
                stuck.slow_down()

    def takes_untrusted(self, tenant: str) -> bool:
        """Whether a job that may take long can be added: each tenant may have one stuck job."""
        with self._changed:
            return len(self._stuck) < MAX_STUCK and all(thread.tenant != tenant for thread in self._stuck)

    def cpu_s(self) -> float:
        """Returns the CPU time of the thread that runs the next jobs."""
        return cpu_time_s(self._current.thread)

    def _run(self, me: "_JobThread") -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs)
                job = self._jobs.popleft()
            job.known.wait()
            me.tenant, me.began = job.tenant, (time.monotonic(), time.thread_time())
            job.run()
            with self._changed:
                me.began = None
                if me in self._stuck:
                    self._stuck.remove(me)
                    return


class _JobThread:
    """A thread of a lane, and its current job."""

    def __init__(self, run: "Callable[[_JobThread], None]") -> None:
        self.tenant = ""
        self.began: tuple[float, float] | None = None
        """Elapsed and CPU time at the job's beginning; None between jobs."""
        self._is_slow = False
        self.thread = threading.Thread(target=run, args=(self,), name="masks", daemon=True)
        self.thread.start()

    def is_stuck(self) -> bool:
        began = self.began
        if began is None:
            return False
        took_s = time.monotonic() - began[0]
        return took_s > STUCK_WALL_S or (took_s > STUCK_S and cpu_time_s(self.thread) - began[1] > STUCK_S)

    def slow_down(self) -> None:
        """Lowers the priority once the job is slow. The thread ends after this job."""
        began = self.began
        if began is not None and not self._is_slow and time.monotonic() - began[0] > SLOW_JOB_S:
            self._is_slow = True
            assert self.thread.native_id is not None, "it has started"
            lower_priority(self.thread.native_id)


class BackgroundLane:
    """Runs work for slow grammars at a low priority. Runs one piece of work per tenant at a time, and next that of the
    tenant that has used the least time. No step waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[RowWork] = []
        self._used_s: defaultdict[str, float] = defaultdict(float)
        """CPU time by tenant."""
        self._num_threads = 0
        self._busy: set[str] = set()
        """Tenants whose work is running."""

    def add_work(self, work: RowWork) -> None:
        """Queues work. Starts another thread if needed."""
        with self._changed:
            if all(work.tenant != other.tenant for other in self._waiting):
                # Time in which a tenant had no work gives it no advantage over the others.
                least_s = min((self._used_s[other.tenant] for other in self._waiting), default=0.0)
                self._used_s[work.tenant] = max(self._used_s[work.tenant], least_s)
            self._waiting.append(work)
            if self._num_threads < min(BACKGROUND_THREADS, len(self._waiting) + len(self._busy)):
                self._num_threads += 1
                threading.Thread(target=self._run, name=f"background masks {self._num_threads}", daemon=True).start()
            self._changed.notify()

    def _run(self) -> None:
        lower_priority()
        while True:
            work = self._next()
            began_s = time.thread_time()
            is_done = work.run()
            work.lock.release()
            if is_done:
                work.finish()
            with self._changed:
                self._busy.remove(work.tenant)
                self._used_s[work.tenant] += time.thread_time() - began_s
                if not is_done:
                    self._waiting.append(work)
                elif not self._waiting and not self._busy:
                    self._used_s.clear()

    def _next(self) -> RowWork:
        """Waits for work that can run and whose grammar is not in use, and acquires the grammar's lock."""
        with self._changed:
            while True:
                for work in sorted(self._waiting, key=lambda work: self._used_s[work.tenant]):
                    is_due = work.tenant not in self._busy and work.known.is_set()
                    if is_due and work.lock.acquire(blocking=False):
                        self._waiting.remove(work)
                        self._busy.add(work.tenant)
                        return work
                self._changed.wait(RECHECK_S if self._waiting else None)
