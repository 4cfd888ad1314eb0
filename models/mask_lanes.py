"""Threads that work for rows' grammars: one that steps wait for, and a few low-priority ones for slow grammars. Knows
no grammar and no batch."""

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

BACKGROUND_THREADS = 2
BACKGROUND_NICE = 10
"""Niceness of threads that no step waits for. While the layers need every core, such a thread gets a tenth of one."""
RECHECK_S = 0.01
"""How soon a grammar that another thread uses is tried again."""

T = TypeVar("T")


class WorkerThread:
    """Does one thing after another. Unlike the threads of a pool it ends with the process, whatever it waits for."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Returns a future of the work's result."""
        done: Future[T] = Future()
        self._work.put((done, work))
        return done

    def retire(self) -> None:
        """Lowers the thread's priority, and ends it after what was submitted."""
        if self._thread.native_id is not None:
            lower_priority(self._thread.native_id)
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            done, work = item
            try:
                done.set_result(work())
            except BaseException as error:  # the library's panics are no Exceptions
                done.set_exception(error)


def lower_priority(thread_id: int) -> None:
    """Lowers the priority of a thread, if it still runs."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread_id, BACKGROUND_NICE)


class Work(Protocol):
    """What a grammar computes for one row."""

    @property
    def tenant(self) -> str:
        """The row's."""
        ...

    @property
    def lock(self) -> threading.Lock:
        """The grammar's: held while ``run`` runs."""
        ...

    def run(self) -> None:
        """Computes it. Raises nothing."""
        ...


class BackgroundLane:
    """Works for slow grammars at a low priority, next for the tenant that has used the least time. No step waits for
    it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Work] = []
        self._used_s: defaultdict[str, float] = defaultdict(float)
        """CPU time, by tenant."""
        self._num_threads = self._num_busy = 0

    def add(self, work: Work) -> None:
        """Queues work. Threads start when they are needed."""
        with self._changed:
            if all(work.tenant != other.tenant for other in self._waiting):
                # Time in which a tenant had no work gives it no advantage over the others.
                least_s = min((self._used_s[other.tenant] for other in self._waiting), default=0.0)
                self._used_s[work.tenant] = max(self._used_s[work.tenant], least_s)
            self._waiting.append(work)
            if self._num_busy == self._num_threads < BACKGROUND_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._run, name=f"background masks {self._num_threads}", daemon=True).start()
            self._changed.notify()

    def _run(self) -> None:
        lower_priority(threading.get_native_id())
        while True:
            work = self._next()
            began_s = time.thread_time()
            try:
                work.run()
            finally:
                work.lock.release()
                with self._changed:
                    self._num_busy -= 1
                    self._used_s[work.tenant] += time.thread_time() - began_s
                    if not self._waiting and not self._num_busy:
                        self._used_s.clear()

    def _next(self) -> Work:
        """Waits for work whose grammar no other thread uses, and takes the grammar's lock."""
        with self._changed:
            while True:
                for work in sorted(self._waiting, key=lambda work: self._used_s[work.tenant]):
                    if work.lock.acquire(blocking=False):
                        self._waiting.remove(work)
                        self._num_busy += 1
                        return work
                self._changed.wait(RECHECK_S if self._waiting else None)
