"""The masks of one batch, which threads compute while the layers run. A step waits for them at most for its budget."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from time import monotonic, thread_time

from penstock.models.batch.grammar_matcher import CompiledGrammar, Words
from penstock.models.structured_output.mask_lanes import RECHECK_S, BackgroundLane, MaskJob, StepLane
from penstock.models.structured_output.mask_work import TRUSTED_S, MaskTools, RowWork, compute, failing

STEP_BUDGET_S = 0.01
"""How long a step waits for masks once the tokens before them are known. This time overlaps with the layers."""
LOADED_BUDGET_S = 0.03
"""How long it waits if their thread gets less than ``STEP_BUDGET_S`` of CPU time, because the cores are busy."""


class MaskRound:
    """The masks of one batch. Threads of a lane compute them; another thread waits for the result."""

    def __init__(
        self,
        words: Words,
        known: threading.Event,
        tools: Future[MaskTools],
        lane: StepLane,
        background: BackgroundLane | None,
        on_late: Callable[[], None],
    ) -> None:
        """``background`` takes rows that are late; None means that the step waits for all rows, without a budget.
        ``on_late`` is called when a row that was late may be in a batch again."""
        self.words = words
        self.late: set[int] = set()
        """The numbers of rows whose masks are late, known once there is a result. No token may be chosen for them."""
        self._known = known
        self._tools = tools
        self._lane = lane
        self._background = background
        self._on_late = on_late
        self._created = monotonic(), lane.cpu_s()
        self._changed = threading.Condition()
        self._works: list[RowWork] = []
        self._open: set[RowWork] = set()
        """The work for which the step waits."""
        self._late_lines: list[slice] = []
        self._took_s: defaultdict[CompiledGrammar, float] = defaultdict(float)

    def add_row(self, work: RowWork) -> None:
        """Adds a row. Called before ``start_jobs``."""
        self._works.append(work)
        self._open.add(work)
        work.words = self.words

    def skip_row(self, work: RowWork) -> None:
        """Records that the step does not wait for a row."""
        self._open.discard(work)
        self.late.add(work.row.number)
        self._late_lines.append(work.sampled)

    def start_jobs(self) -> None:
        """Starts to compute the masks. A tenant's trusted rows share a job; each other row has its own."""
        together: defaultdict[str, list[RowWork]] = defaultdict(list)
        for work in self._works:
            if work.matcher.is_trusted:
                together[work.tenant].append(work)
        jobs = [MaskJob(tenant, self._known, partial(self._run_together, works)) for tenant, works in together.items()]
        alone = [work for work in self._works if not work.matcher.is_trusted]
        self._lane.add_jobs(
            jobs + [MaskJob(work.tenant, self._known, partial(self._run_single, work)) for work in alone]
        )

    def finish(self, works: Sequence[RowWork]) -> None:
        """Called when the masks of rows are computed."""
        with self._changed:
            num_late = 0
            for work in works:
                is_late = work not in self._open
                work.end_wait(keeps=is_late)
                num_late += is_late
                self._open.discard(work)
            if not self._open:
                self._changed.notify_all()
        if num_late:
            self._on_late()

    def _run_single(self, work: RowWork) -> None:
        if not self._lock(work):
            return
        began_s = thread_time()
        while not work.run():
            pass
        work.lock.release()
        grammar = work.matcher.grammar
        self._took_s[grammar] += thread_time() - began_s
        if self._took_s[grammar] > STEP_BUDGET_S:
            # Many rows may take long together even if no single row does.
            grammar.note_slow()
            self._took_s[grammar] = 0.0
        self.finish([work])

    def _run_together(self, works: list[RowWork]) -> None:
        began_s = monotonic()
        with ExitStack() as held:
            taken: set[threading.Lock] = set()
            together = []
            for work in works:
                if work.lock not in taken and self._lock(work):
                    taken.add(work.lock)
                    held.callback(work.lock.release)
                if work.lock in taken:
                    together.append(work)
            with failing(together):
                compute(together, self.words, self._tools.result())
        num_sampled = sum(1 + len(work.drafts) for work in together)
        if monotonic() - began_s > TRUSTED_S * max(2, num_sampled):
            for work in together:
                work.matcher.is_trusted = False
        self.finish(together)

    def _lock(self, work: RowWork) -> bool:
        """Acquires the lock of the row's grammar, or moves the row to the background and returns False."""
        if work.lock.acquire(blocking=self._background is None):
            return True
        assert self._background is not None
        with self._changed:
            if work in self._open:
                self.skip_row(work)
            if not self._open:
                self._changed.notify_all()
        self._background.add_work(work)
        return False

    def result(self) -> Words:
        """Waits for the masks, at most for the budget: (sampled positions, ceil(V / 32)). If a row's output has ended
        or cannot continue, only an end token is allowed. A late row's masks have no meaning."""
        began = self._created
        if not self._known.is_set():
            self._known.wait()
            began = monotonic(), self._lane.cpu_s()
        with self._changed:
            while self._open and (left_s := self._left_s(*began)) > 0.0:
                self._changed.wait(left_s)
            for work in list(self._open):
                self.skip_row(work)
        words = self.words.copy() if self._late_lines else self.words
        for sampled in self._late_lines:
            words[sampled] = 0
            words[sampled, 0] = 1
        # Tokens after a draft that cannot come are never chosen.
        is_empty = ~words.any(axis=1)
        if is_empty.any():
            words[is_empty] = self._tools.result().end_words
        return words

    def _left_s(self, began_at: float, began_cpu_s: float) -> float:
        """Returns the maximum time to wait before the next check."""
        if self._background is None:
            return threading.TIMEOUT_MAX
        waited_s = monotonic() - began_at
        if waited_s < STEP_BUDGET_S:
            return STEP_BUDGET_S - waited_s
        used_s = self._lane.cpu_s() - began_cpu_s
        return RECHECK_S if waited_s < LOADED_BUDGET_S and used_s < STEP_BUDGET_S else 0.0
