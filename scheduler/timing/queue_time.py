"""Predicts when a request's first and last token will come, with a fluid model of the queue. It sees only counts and
times.

Everything ahead of a request is work for the same worker, so the times add up:

- The request waits for the steps that compute the prompts ahead and its own, chunk by chunk, and for a free row and
  blocks; the longer wait counts. Each step costs a constant, plus the time of the rows that decode in it.
- To that, the prompt tokens that must be computed are added, each once. Cached tokens cost nothing.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.scheduler.timing.queued_work import NO_WORK, QueuedWork
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork

_PRUDENCE = 0.05
"""A request's own output is assumed to be longer than all but this share of the known outputs."""
_NUM_RATIOS = 64
"""The number of recently ended requests whose times are compared with the predictions."""
_NUM_LATER = 4
"""The latest predicted time uses the ratio with this rank among these, the worst being 1."""
_USUAL_LATENESS, _MAX_LATENESS = 1.3, 3.0
_MAX_KNOWN = 512
"""After this many outputs the weights of the known ones are halved, so that new ones have an effect."""
_PRIOR = 0.1
"""The weight of a prior for each length: this many outputs, half of which ended by themselves."""
_RECENT_OUTPUTS = 64
"""The mean output length is over about this many outputs, because rows that end now resemble those that began
recently."""
_BIAS_RATE = 0.1
"""The share of an error in the time to the first token that one observation corrects."""
_MAX_BIAS_STEP = 0.7
_ARRIVAL_RATE = 0.125
"""The weight of a new prompt's time in the mean."""
_MAX_BIAS = 4.0
"""The largest correction factor, however wrong the predictions are."""
_MAX_PARTS = 4
"""A long time of prompts is divided into this many parts; in each, the number of decoding rows is constant."""
_LEAST_S = 1e-6
"""The smallest time to divide by: a model with few observations may predict zero."""


@dataclass(slots=True)
class QueueLoad:
    """The load when a request arrives."""

    in_flight_s: float
    """The predicted time until the plans in flight are answered."""
    decodes: int
    decode_kv: int
    """The number of rows that decode, and the sum of their lengths."""
    remaining: Sequence[int]
    """For each running row, the most output tokens it may still have, in any order."""
    free_rows: int
    max_rows: int
    free_blocks: int
    num_blocks: int
    block_size: int
    prefill_tokens: int = 0
    """Tokens of the running rows' histories that are not planned yet."""
    prefill_kv: int = 0
    """The tokens that each of ``prefill_tokens`` attends to, summed."""
    prefill_rows: int = 0
    prefill_context: int = 0
    """The number of rows with prompt tokens that are not planned yet, and the sum of the lengths of their histories."""
    ahead: QueuedWork = NO_WORK
    """The queued work that gets a row sooner."""


class Prediction(NamedTuple):
    """Seconds from now."""

    ttft_s: float
    """The time to the first token."""
    total_s: float
    """The time to the last token."""
    latest_s: float
    """The time to the last token, exceeded only in a few cases."""
    modelled_ttft_s: float
    """The time to the first token, before the correction by earlier predictions' errors."""


class QueueTimeModel:
    """Predicts times, and learns how long outputs are: often they are shorter than ``max_tokens``."""

    def __init__(self, model: StepTimeModel, budget: int, target_itl_s: float | None) -> None:
        self._model = model
        self._budget = budget
        self._target_itl_s = target_itl_s
        self._lengths = OutputLengths()
        self._lateness: dict[tuple[int, bool], deque[float]] = {}
        """The last ratios of a request's time to the predicted one, by kind of request."""
        self._mean_prompt_s: dict[bool, float] = {}
        self._bias = {True: 1.0, False: 1.0}
        """For prompts that are mostly cached, and for others."""
        self._mean_output = 0.0
        self._num_outputs = 0

    def configure(self, budget: int, target_itl_s: float | None) -> None:
        self._budget = budget
        self._target_itl_s = target_itl_s

    def learn(self, num_output: int, max_tokens: int) -> None:
        """Records the length of an output that ended, by itself or at ``max_tokens``."""
        self._lengths.learn(num_output, num_output < max_tokens)
        self._num_outputs = min(self._num_outputs + 1, _RECENT_OUTPUTS)
        self._mean_output += (num_output - self._mean_output) / self._num_outputs

    def learn_arrival(self, own: QueuedWork) -> None:
        """Records a new request's work: more requests like it may follow."""
        seconds = self._model.predict(_own_work(own, 1, 0, 0), 0)
        if seconds is not None:
            is_cached = _is_cached(own)
            mean = self._mean_prompt_s.get(is_cached, seconds)
            self._mean_prompt_s[is_cached] = mean + _ARRIVAL_RATE * (seconds - mean)

    def learn_ttft(self, own: QueuedWork, modelled_s: float, took_s: float) -> None:
        """Records the time from a request's admission to its first token, and what the model predicted at admission.

        Costs that the step model does not cover (the way to the worker and back, later requests in the same step)
        appear as a factor, which each request corrects a little. In a burst, all predictions are made before the first
        one is tested, so the error is measured against the current factor, not against the one used then.
        """
        is_cached = _is_cached(own)
        bias = self._bias[is_cached]
        error = math.log(max(took_s, _LEAST_S) / max(modelled_s, _LEAST_S) / bias)
        error = max(-_MAX_BIAS_STEP, min(_MAX_BIAS_STEP, error))
        self._bias[is_cached] = max(1 / _MAX_BIAS, min(_MAX_BIAS, bias * math.exp(_BIAS_RATE * error)))

    def learn_total(self, own: QueuedWork, predicted_s: float, took_s: float) -> None:
        """Records the time from a request's admission to its last token, and what was predicted at admission."""
        usual = deque([_USUAL_LATENESS] * _NUM_RATIOS, maxlen=_NUM_RATIOS)
        ratios = self._lateness.setdefault(_kind(own, predicted_s), usual)
        ratios.append(min(took_s / max(predicted_s, _LEAST_S), _MAX_LATENESS))

    def lateness(self, own: QueuedWork, predicted_s: float) -> float:
        """Returns the factor by which similar requests are late, in all but a few cases.

        The first requests of a burst take much longer than predicted, because the requests that follow are unknown; the
        last ones do not. Requests after one with a cached prompt are likely to be cached too. So each request is
        compared only with those of about the same prediction and kind of prompt."""
        ratios = self._lateness.get(_kind(own, predicted_s))
        return _USUAL_LATENESS if ratios is None else max(1.0, sorted(ratios)[-_NUM_LATER])

    def forget_lateness(self) -> None:
        """Discards what was learned about the times of whole requests."""
        self._lateness.clear()

    def predict(
        self, load: QueueLoad, own: QueuedWork, max_tokens: int, forks: QueuedWork = NO_WORK
    ) -> Prediction | None:
        """Predicts the times of a request that arrives now, with its own work, and with ``forks`` after its first
        token; None while too little is known."""
        ahead, num_rows = load.ahead, len(load.remaining)
        rows = min(load.max_rows, num_rows + ahead.rows)
        kv_each = (load.decode_kv + load.prefill_context + ahead.context + own.context) / (
            num_rows + ahead.rows + max(1, own.rows)
        )
        num_tokens = load.prefill_tokens + ahead.tokens + own.tokens
        prefill = self._prefill(load, num_tokens, kv_each, own.length)
        own_chunks = math.ceil(own.tokens / prefill.chunk)
        num_turns = math.ceil((ahead.pooled + own.pooled) / load.max_rows)
        steps = max(prefill.steps, num_turns, self._steps_to_row(load, own) + own_chunks)
        # The running rows continue until one ends.
        decodes = prefill.decodes + (steps - prefill.steps) * rows
        num_splits = max(0, prefill.steps - 1)
        work = StepWork(
            num_tokens,
            load.prefill_kv + ahead.kv + own.kv,
            decodes,
            decodes * kv_each,
            load.prefill_rows + ahead.chunks + own.chunks + num_splits,
            # The first of two steps that share a prompt computes only a part of it.
            load.prefill_context + _lengths(ahead) + _lengths(own) + num_splits * own.length / 2,
            ahead.evicted_blocks + own.evicted_blocks,
        )
        seconds = self._model.predict(work, steps)
        if seconds is None:
            return None
        if steps == prefill.steps:
            rows = prefill.rows
        rows = min(load.max_rows, rows + max(1, own.rows) + forks.rows)
        ttft_s = load.in_flight_s + seconds
        long, prompt_s = self._lengths.long(max_tokens, _PRUDENCE), self._mean_prompt_s.get(_is_cached(own), math.inf)
        total_s = ttft_s + self._decoding_s(rows, kv_each * rows, long, prompt_s)
        if forks.rows:
            total_s += self._model.predict(_own_work(forks, 1, 0, 0)) or 0.0
        # The reported time is the best estimate. Admission uses the latest time, which has its own margin.
        return Prediction(self._bias[_is_cached(own)] * ttft_s, total_s, total_s * self.lateness(own, total_s), ttft_s)

    def service_s(self, decodes: int, decode_kv: int, own: QueuedWork, max_tokens: int) -> float | None:
        """Returns the time from a request's first step to its last token if it begins now, beside these decodes."""
        steps = math.ceil(own.tokens / self._chunk(decodes, decode_kv, own.length))
        seconds = self._model.predict(_own_work(own, steps, decodes * steps, decode_kv * steps), steps)
        if seconds is None:
            return None
        length = self._lengths.expected(max_tokens)
        prompt_s = self._mean_prompt_s.get(_is_cached(own), math.inf)
        return seconds + self._decoding_s(decodes + max(1, own.rows), decode_kv + own.context, length, prompt_s)

    def alone_s(self, own: QueuedWork, max_tokens: int) -> float | None:
        """Returns the time from a request's first step to its last token when it runs alone."""
        chunks = math.ceil(own.tokens / self._chunk(0, 0, own.length))
        output = max(0.0, self._lengths.expected(max_tokens) - 1)
        steps = output / self._model.tokens_each
        decodes = steps * max(1, own.rows)
        kv = decodes * (own.length + output / 2)
        return self._model.predict(_own_work(own, chunks, decodes, kv), chunks + steps)

    def _prefill(self, load: QueueLoad, num_tokens: float, kv_each: float, length: float) -> "_Prefill":
        """Returns the steps until all these prompt tokens are computed and the rows ahead decode."""
        # Rows that begin in the next step do not slow it down.
        chunk = self._chunk(load.decodes, load.decode_kv, length)
        steps, decodes = 1.0, float(load.decodes)
        left = max(0.0, num_tokens - chunk)
        joining = len(load.remaining) - load.decodes + load.ahead.rows
        running = min(load.max_rows, load.decodes + joining * (1 - left / num_tokens))
        num_parts = min(_MAX_PARTS, math.ceil(left / chunk))
        output_steps = self._mean_output / self._model.tokens_each
        for _ in range(num_parts):
            part, joined = left / num_parts, joining * left / num_tokens / num_parts
            chunk = self._chunk(running, running * kv_each, length)
            part_steps = part / chunk
            # While some rows begin to decode, others end.
            ended = part_steps / output_steps if output_steps else 0.0
            after = min(load.max_rows, (running + joined) / (1 + ended))
            decodes += part_steps * (running + after) / 2
            steps += part_steps
            running = after
        rounded = math.ceil(steps - 1e-6)
        return _Prefill(rounded, decodes * rounded / steps, chunk, running)

    def _chunk(self, decodes: float, decode_kv: float, length: float) -> int:
        """Returns the number of prompt tokens in a step."""
        budget = max(1, self._budget - int(decodes))
        if int(decodes) == 0:
            return budget
        context = int(length) // 2
        return self._model.max_prefill(int(decodes), int(decode_kv), context, self._target_itl_s, budget)

    def _steps_to_row(self, load: QueueLoad, own: QueuedWork) -> int:
        """Returns the steps until enough running rows have ended for the request, behind others, to begin."""
        num_ahead = int(load.ahead.rows)
        # Requests ahead that get a row at once run as well.
        remaining = [*load.remaining, *[self._mean_output] * min(load.free_rows, num_ahead)]
        num_rows = len(remaining)
        if not num_rows:
            return 0
        missing_rows = num_ahead + 1 - load.free_rows
        needed_blocks = load.ahead.new_blocks + own.new_blocks
        blocks_each = max(1.0, (load.num_blocks - load.free_blocks) / num_rows)
        missing = max(missing_rows, math.ceil((needed_blocks - load.free_blocks) / blocks_each))
        if missing <= 0:
            return 0
        return math.ceil(self._tokens_to_end(remaining, missing) / self._model.tokens_each)

    def _tokens_to_end(self, remaining: Sequence[float], num_ends: int) -> float:
        """Returns the tokens that each row gets until ``num_ends`` rows have ended: running ones, and those that take
        their places one after another."""
        num_rows = len(remaining)
        mean = sum(remaining) / num_rows
        shorter = self._lengths.expected(round(mean)) / mean if mean >= 1 else 1.0
        # In the steady state, each row ends once in the time of a whole output.
        cycles = max(0, (num_ends - 1) // num_rows - 1)
        index = num_ends - 1 - cycles * num_rows
        successors = range(2 + index // num_rows)
        ends = sorted(left * shorter + number * self._mean_output for left in remaining for number in successors)
        return ends[index] + cycles * self._mean_output

    def _decoding_s(self, rows: float, kv: float, length: float, prompt_s: float) -> float:
        """Returns the time after a first token: the steps that the output needs, prolonged by other requests' prompts,
        each of which takes ``prompt_s``."""
        steps = max(0.0, length - 1) / self._model.tokens_each
        seconds = self._model.predict(StepWork(0, 0, rows * steps, kv * steps), steps)
        if seconds is None:
            return 0.0
        others_s = seconds * (self._model.slowdown - 1)
        if self._mean_output:
            # Another prompt may follow a row that ends, and may be cached by then. The model assumes that half are.
            others_s = min(others_s, rows / 2 * prompt_s * length / self._mean_output)
        return seconds + others_s


class OutputLengths:
    """The lengths that outputs would have without limits, in octaves: [1, 1], [2, 3], [4, 7] and so on.

    For each octave it counts the outputs that reached it, and those of them that ended in it by themselves. So an
    output that was cut short still counts for the shorter lengths.
    """

    _NUM_OCTAVES = 32

    def __init__(self) -> None:
        self._entered = [_PRIOR] * self._NUM_OCTAVES
        self._ended = [_PRIOR / 2] * self._NUM_OCTAVES

    def learn(self, length: int, ended: bool) -> None:
        """Records an output of ``length``, which ended by itself or was cut there."""
        octave = max(1, length).bit_length() - 1
        for index in range(octave + 1):
            self._entered[index] += 1
        self._ended[octave] += ended
        if self._entered[0] > _MAX_KNOWN:
            self._entered = [count / 2 for count in self._entered]
            self._ended = [count / 2 for count in self._ended]

    def expected(self, limit: int) -> float:
        """Returns the mean length of outputs under ``limit``."""
        mean, alive, begin = 0.0, 1.0, 1
        for entered, ended in zip(self._entered, self._ended, strict=True):
            if begin > limit:
                break
            tokens = min(begin, limit - begin + 1)
            ending = ended / entered
            # Outputs that get here have the octave's first token; those that end in it are spread evenly.
            mean += alive * (tokens - ending * tokens * (tokens - 1) / (2 * begin))
            alive *= 1 - ending
            begin *= 2
        return mean

    def long(self, limit: int, longer: float) -> int:
        """Returns the length, at most ``limit``, that a share ``longer`` of the outputs exceeds."""
        alive, begin = 1.0, 1
        for entered, ended in zip(self._entered, self._ended, strict=True):
            if begin > limit:
                break
            ending = ended / entered
            if alive * (1 - ending) <= longer:
                return min(limit, begin + int(begin * (1 - longer / alive) / ending))
            alive *= 1 - ending
            begin *= 2
        return limit


def _kind(own: QueuedWork, predicted_s: float) -> tuple[int, bool]:
    """Returns the kind of a request: requests of one kind have predictions that differ by at most a fifth, and prompts
    that are mostly cached, or mostly not."""
    return math.floor(4 * math.log2(max(predicted_s, _LEAST_S))), _is_cached(own)


def _is_cached(own: QueuedWork) -> bool:
    """Returns whether most of the prompt is cached, or shared with requests ahead."""
    return own.tokens < _lengths(own) / 2


class _Prefill(NamedTuple):
    """The steps that compute prompts."""

    steps: int
    decodes: float
    """Rows continued in these steps, summed over the steps."""
    chunk: int
    """Prompt tokens in the last step."""
    rows: float
    """Rows that decode after these steps."""


def _lengths(work: QueuedWork) -> float:
    return work.context + work.pooled_context


def _own_work(own: QueuedWork, steps: int, decodes: float, decode_kv: float) -> StepWork:
    """Returns the work of one request, computed in ``steps`` steps, beside these decodes."""
    num_splits = max(0, steps - 1)
    chunk_kv = _lengths(own) + num_splits * own.length / 2
    return StepWork(own.tokens, own.kv, decodes, decode_kv, own.chunks + num_splits, chunk_kv, own.evicted_blocks)
