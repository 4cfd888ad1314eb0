"""Applies the worker's results to sequences: tokens, a vector, or the reason why the sequence cannot continue.

It does not see plans. A request that ends through a result is ended by the scheduler, which owns it.
"""

import logging
from collections.abc import Callable, Sequence

from penstock.scheduler.admission.latency_predictor import LatencyPredictor
from penstock.scheduler.plan import RowFailure, RowResult, TokenLogprobs
from penstock.scheduler.planning.planner import Planner
from penstock.scheduler.planning.sequence import RequestState, SequenceState, SequenceStatus
from penstock.scheduler.request import Embedded, EngineFinishReason, SequenceDelta, TokensInjected

_REASONS = {
    RowFailure.COSTLY: EngineFinishReason.GRAMMAR,
    RowFailure.DEAD_END: EngineFinishReason.DEAD_END,
    RowFailure.SLOW: EngineFinishReason.SLOW_CONSTRAINT,
}

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Applies a step's results to the sequences they belong to. Reads the planner and the latency predictor; owns
    neither."""

    def __init__(
        self,
        planner: Planner,
        predictor: LatencyPredictor,
        clock: Callable[[], float],
        finish: Callable[[RequestState, EngineFinishReason, str], None],
    ) -> None:
        """``finish`` ends a request, with a message."""
        self._planner = planner
        self._predictor = predictor
        self._clock = clock
        self._finish = finish
        self._block_size = planner.kv.block_size
        self._states = planner.states if planner.kv.states.num_slots else None

    def apply(self, row: RowResult) -> None:
        sequence = self._planner.rows.holder(row.row, row.epoch)
        max_tokens = sequence.in_flight.popleft()
        if sequence.state is SequenceStatus.ENDED:
            return
        token_ids = row.token_ids
        num_tokens = len(token_ids)
        assert num_tokens <= max_tokens, f"the result of row {row.row} has {num_tokens} tokens"
        has_token = num_tokens or not max_tokens or row.failure or sequence.live.request.grammar
        assert has_token, f"the result of row {row.row} has no token"
        if num_tokens < max_tokens:
            sequence.fall_short(max_tokens - num_tokens)
        sequence.token_ids += token_ids
        if row.num_drafted:
            self._count_drafts(sequence, row, max(0, num_tokens - 1))
        if max_tokens > 1 and sequence.repetition is not None and sequence.repetition.is_found:
            sequence.repetition.count(max(0, num_tokens - 1), len(sequence.token_ids))
            sequence.set_max_drafts()
        # After preemption the row has no KV any more, or none yet; its tokens are still valid.
        if sequence.row == row.row and not row.failure:
            self._advance(sequence, row)
        if num_tokens:
            if not sequence.live.request.is_warm_up:  # its token is discarded
                self._planner.counters.output_tokens += num_tokens
                sequence.live.tenant.num_new += num_tokens
            self._deliver(sequence, token_ids, row.logprobs)
        is_embedded = sequence.is_pooled and row.num_computed == sequence.num_prompt_tokens
        assert is_embedded == (row.vector is not None), f"row {row.row} has a vector too soon, or has none in the end"
        if row.vector is not None:
            sequence.live.request.sink(Embedded(sequence.index, row.vector))
            self._end(sequence, EngineFinishReason.STOP)
        if row.failure:
            self._break_off(sequence, _REASONS[row.failure_kind], row.failure)
        if self._states is not None and sequence.row == row.row:
            self._states.give_up_passed(sequence)
        if sequence.to_inject:
            self.inject_due(sequence)

    def _advance(self, sequence: SequenceState, row: RowResult) -> None:
        """Records what is computed of a row, and publishes its blocks and states."""
        if row.token_ids:
            assert row.num_computed == len(sequence.token_ids) - 1, f"row {row.row} is out of step with its worker"
        else:
            # A decoding row that skips a step has made no progress.
            most = max(sequence.num_planned, len(sequence.token_ids) - 1)
            assert row.num_computed <= most, f"row {row.row} is ahead of its plans"
        sequence.num_computed = row.num_computed
        if row.num_computed >= (sequence.num_published + 1) * self._block_size:
            self._planner.publish(sequence, row.num_computed // self._block_size)
        if self._states is not None:
            self._states.confirm(sequence)

    def inject(self, sequence: SequenceState, token_ids: Sequence[int]) -> None:
        """Injects tokens after the tokens in flight, which are delivered first."""
        sequence.to_inject += token_ids
        if sequence.state is not SequenceStatus.WAITING:
            self._planner.suspend(sequence)
        self.inject_due(sequence)

    def inject_due(self, sequence: SequenceState) -> None:
        """Injects the tokens that a sequence waits for, if no token is in flight any more."""
        if not sequence.to_inject or sequence.in_flight or sequence.state is not SequenceStatus.WAITING:
            return
        try:
            delta = sequence.output.flush()
        except Exception as error:
            self._give_up(sequence.live, error)
            return
        if delta is not None:
            self._emit(sequence, delta)
        if sequence.state is SequenceStatus.WAITING:  # its caller may have aborted it, or a stop string was complete
            num_tokens = self._planner.inject(sequence)
            sequence.live.timeline.injected(sequence.index, num_tokens)
            sequence.live.request.sink(TokensInjected(sequence.output.num_tokens, num_tokens))

    def limit(self, sequence: SequenceState, max_tokens: int) -> None:
        """Limits the output to this many tokens, and ends it at once if there are as many."""
        sequence.limit(max_tokens)
        if sequence.output.num_tokens < max_tokens or sequence.output.end is not None:
            return
        try:
            delta = sequence.output.cut()
        except Exception as error:
            self._give_up(sequence.live, error)
        else:
            self._emit(sequence, delta)

    def end_resumed(self, live: RequestState) -> None:
        """Ends the sequences of a resumed request whose output was complete, or has reached its limit by now."""
        for sequence in list(live.sequences):
            if sequence.output.end is not None:
                self._end(sequence, sequence.output.end.reason)
            elif sequence.state is not SequenceStatus.ENDED:  # the caller may have aborted the request
                self.limit(sequence, sequence.output.max_tokens)

    @staticmethod
    def cut_short(live: RequestState, reason: EngineFinishReason) -> list[SequenceDelta]:
        """Ends the output of a request that ends early. Returns the last delta of each sequence that has output and has
        not ended, so that the caller gets all tokens that it pays for. Returns none after an internal error, which may
        leave the text in any state."""
        deltas: list[SequenceDelta] = []
        if reason is EngineFinishReason.INTERNAL:
            return deltas
        for sequence in live.sequences:
            if sequence.output.end is None and sequence.output.num_tokens:
                try:
                    deltas.append(sequence.output.cut(reason))
                except Exception as error:
                    _log_broken_text(live, error)
        return deltas

    def _count_drafts(self, sequence: SequenceState, row: RowResult, num_accepted: int) -> None:
        sequence.live.timeline.drafted(sequence.index, row.num_drafted, num_accepted)
        for counts in (sequence.live.speculation, self._planner.counters.speculation):
            counts.count_step(row.num_drafted, num_accepted, row.is_predicted)

    def _deliver(self, sequence: SequenceState, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        live = sequence.live
        if live.first_token_at is None:
            live.first_token_at = self._clock()
            live.timeline.first_token_at = live.first_token_at
            self._predictor.began(live, live.first_token_at)
        try:
            delta = sequence.output.take_tokens(token_ids, logprobs)
        except Exception as error:
            self._give_up(live, error)
            return
        if delta is not None:
            self._emit(sequence, delta)

    def _emit(self, sequence: SequenceState, delta: SequenceDelta) -> None:
        sequence.live.request.sink(delta)
        if delta.end is not None:
            self._end(sequence, delta.end.reason)

    def _break_off(self, sequence: SequenceState, reason: EngineFinishReason, why: str) -> None:
        """Ends the request of a sequence that the worker cannot continue: a request continues with all of its sequences
        or none."""
        if sequence.state is not SequenceStatus.ENDED:
            self._finish(sequence.live, reason, why)

    def _give_up(self, live: RequestState, error: Exception) -> None:
        """Ends a request whose text state raised an error. The text state is not part of the scheduler, and its errors
        must not end other requests."""
        _log_broken_text(live, error)
        self._finish(live, EngineFinishReason.INTERNAL, "the output could not be turned into text")

    def _end(self, sequence: SequenceState, reason: EngineFinishReason) -> None:
        """Ends a sequence whose last output was delivered. Its caller may have aborted the request in the meantime."""
        live = sequence.live
        if sequence.state is not SequenceStatus.ENDED:
            self._planner.retire(sequence)
            live.num_ended += 1
            if live.num_ended == live.request.n:
                self._finish(live, reason, "")


def _log_broken_text(live: RequestState, error: Exception) -> None:
    request_id = live.request.request_id
    logger.error("request %s: its tokens could not be turned into text", request_id, exc_info=error)
