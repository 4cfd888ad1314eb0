"""Collects the masks of one batch, which threads compute while the layers run. A step waits for them no longer than its
budget."""

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
"""How long a step waits for masks once the tokens before them are known. The time of the layers is not added to it."""
LOADED_BUDGET_S = 0.03
"""How long it waits while the thread that computes them has not had ``STEP_BUDGET_S`` of CPU time, since other
programs use the cores."""


class MaskRound:
    """The masks of one batch. Threads of a lane compute them, another one waits for its result."""

    def __init__(
        self,
        words: Words,
        known: threading.Event,
        tools: Future[MaskTools],
        lane: StepLane,
        background: BackgroundLane | None,
        on_late: Callable[[], None],
    ) -> None:
        """``background`` takes rows that are late; None: there is no budget, and the step waits for all of them.
        ``on_late`` is called when a row that was late may be in a batch again."""
        self.words = words
        self.late: set[int] = set()
        """Numbers of rows whose masks were not there in time, once there is a result: nothing may be chosen by them."""
        self._known = known
        self._tools = tools
        self._lane = lane
        self._background = background
        self._on_late = on_late
        self._created = monotonic(), lane.cpu_s()
        self._changed = threading.Condition()
        self._works: list[RowWork] = []
        self._open: set[RowWork] = set()
        """Works that the step waits for."""
        self._late_lines: list[slice] = []
        self._took_s: defaultdict[CompiledGrammar, float] = defaultdict(float)

    def add_row(self, work: RowWork) -> None:
        """Before it is begun: one more row."""
        self._works.append(work)
        self._open.add(work)
        work.words = self.words

    def sits_out(self, work: RowWork) -> None:
        """The step does not wait for a row."""
        self._open.discard(work)
        self.late.add(work.row.number)
        self._late_lines.append(work.sampled)

    def start_jobs(self) -> None:
        """Has the masks computed: of a tenant's rows that took little time together, of each other row by itself."""
        together: defaultdict[str, list[RowWork]] = defaultdict(list)
        for work in self._works:
            if work.matcher.is_trusted:
                together[work.tenant].append(work)
        jobs = [MaskJob(tenant, self._known, partial(self._run_together, works)) for tenant, works in together.items()]
        alone = [work for work in self._works if not work.matcher.is_trusted]
        self._lane.add_jobs(
            jobs + [MaskJob(work.tenant, self._known, partial(self._run_alone, work)) for work in alone]
        )

    def finish(self, works: Sequence[RowWork]) -> None:
        """The masks of rows are there."""
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

    def _run_alone(self, work: RowWork) -> None:
        if not self._lock(work):
            return
        began_s = thread_time()
        while not work.run():
            pass
        work.lock.release()
        grammar = work.matcher.grammar
        self._took_s[grammar] += thread_time() - began_s
        if self._took_s[grammar] > STEP_BUDGET_S:
            # Many rows may take long together though none does by itself.
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
        """Takes the lock of the row's grammar. While another thread has it the row goes to the background, and this
        returns False."""
        if work.lock.acquire(blocking=self._background is None):
            return True
        assert self._background is not None
        with self._changed:
            if work in self._open:
                self.sits_out(work)
            if not self._open:
                self._changed.notify_all()
        self._background.add_work(work)
        return False

    def result(self) -> Words:
        """(lines, ceil(V / 32)), within the budget. Where a row's output has ended, or cannot go on, only its end is
        allowed; where it is late the mask means nothing."""
        began = self._created
        if not self._known.is_set():
            self._known.wait()
            began = monotonic(), self._lane.cpu_s()
        with self._changed:
            while self._open and (left_s := self._left_s(*began)) > 0.0:
                self._changed.wait(left_s)
            for work in list(self._open):
                self.sits_out(work)
        words = self.words.copy() if self._late_lines else self.words
        for sampled in self._late_lines:
            words[sampled] = 0
            words[sampled, 0] = 1
        # What follows a draft that cannot come is never chosen.
        is_empty = ~words.any(axis=1)
        if is_empty.any():
            words[is_empty] = self._tools.result().end_words
        return words

    def _left_s(self, began_at: float, began_cpu_s: float) -> float:
        """How long to wait at most before looking again."""
        if self._background is None:
            return threading.TIMEOUT_MAX
        waited_s = monotonic() - began_at
        if waited_s < STEP_BUDGET_S:
            return STEP_BUDGET_S - waited_s
        used_s = self._lane.cpu_s() - began_cpu_s
        return RECHECK_S if waited_s < LOADED_BUDGET_S and used_s < STEP_BUDGET_S else 0.0
