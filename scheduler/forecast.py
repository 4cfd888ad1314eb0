"""Predicts when a request's first and last token will come, by a fluid model of the queue. Knows only counts and times.

Everything ahead of a request is work for the same worker, so the times add up:

- Steps pass until the prompts ahead and the request's own are computed, chunk by chunk, and until a row and its blocks
  are free, whichever takes longer. Each step costs a constant, and the time of the rows that decode in it.
- Added to that are the tokens of the prompts that have to be computed, each once: what is cached costs nothing.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.scheduler.lane import NO_WORK, QueuedWork
from penstock.scheduler.step_model import StepModel, StepWork

_PRUDENCE = 0.05
"""A request's own output is taken to be so long that only this share of the outputs known was longer."""
_NUM_RATIOS = 64
"""Requests that ended last, whose times are compared with what was predicted for them."""
_NUM_LATER = 4
"""The latest that is predicted is by the second worst of these."""
_USUAL_LATENESS, _MAX_LATENESS = 1.3, 3.0
_MAX_KNOWN = 512
"""Outputs that are known; then they count half, so that new ones show."""
_PRIOR = 0.1
"""Outputs, half of which ended by themselves, that every length is taken to have been known by before the first."""


_RECENT_OUTPUTS = 64
"""That the mean output is about of: what ends a row now is what came lately."""
_BIAS_RATE = 0.1
"""Of the error of a time to the first token, what is corrected at once."""
_MAX_BIAS_STEP = 0.7
_ARRIVAL_RATE = 0.125
"""Of what a new prompt takes, what goes into the mean at once."""
_MAX_BIAS = 4.0
"""However wrong predictions are."""
_MAX_PARTS = 4
"""Of a long time of prompts: in each of them, the number of rows that decode is taken to be even."""
_LEAST_S = 1e-6
"""Of a time that others are held against: a model that knows little may predict none at all."""


@dataclass(slots=True)
class Load:
    """What there is to do when a request arrives."""

    in_flight_s: float
    """Until the plans in flight are answered, as predicted."""
    decodes: int
    decode_kv: int
    """The number of rows that decode, and the sum of their lengths."""
    remaining: Sequence[int]
    """Output tokens that each row that runs may still have at most, in any order."""
    free_rows: int
    max_rows: int
    free_blocks: int
    num_blocks: int
    block_size: int
    prefill_tokens: int = 0
    """Of the rows that run: what is not planned yet of their histories."""
    prefill_kv: int = 0
    """How many tokens each of ``prefill_tokens`` attends to, summed."""
    prefill_rows: int = 0
    prefill_context: int = 0
    """How many rows have prompt tokens that are not planned yet, and the lengths of their histories summed."""
    ahead: QueuedWork = NO_WORK
    """What waits and will have a row sooner."""


class Prediction(NamedTuple):
    """Seconds from now."""

    ttft_s: float
    """To the first token."""
    total_s: float
    """To the last."""
    latest_s: float
    """To the last, in all but a few cases."""
    modelled_ttft_s: float
    """To the first token, before what earlier predictions were worth is taken into account."""


class Forecast:
    """Predicts; and learns how long outputs are, which is often less than they may be."""

    def __init__(self, model: StepModel, budget: int, target_itl_s: float | None) -> None:
        self._model = model
        self._budget = budget
        self._target_itl_s = target_itl_s
        self._lengths = OutputLengths()
        self._lateness: dict[tuple[int, bool], _Lateness] = {}
        self._mean_prompt_s: dict[bool, float] = {}
        self._bias = {True: 1.0, False: 1.0}
        """For prompts that are mostly cached, and for others."""
        self._mean_output = 0.0
        self._num_outputs = 0

    def configure(self, budget: int, target_itl_s: float | None) -> None:
        """The limits of a step have changed."""
        self._budget = budget
        self._target_itl_s = target_itl_s

    def learn(self, num_output: int, max_tokens: int) -> None:
        """An output that might have had ``max_tokens`` ended, by itself or because of that limit."""
        self._lengths.learn(num_output, num_output < max_tokens)
        self._num_outputs = min(self._num_outputs + 1, _RECENT_OUTPUTS)
        self._mean_output += (num_output - self._mean_output) / self._num_outputs

    def learn_arrival(self, own: QueuedWork) -> None:
        """A request with so much work came: more like it may follow."""
        seconds = self._model.predict(_own_work(own, 1, 0, 0), 0)
        if seconds is not None:
            is_cached = _is_cached(own)
            mean = self._mean_prompt_s.get(is_cached, seconds)
            self._mean_prompt_s[is_cached] = mean + _ARRIVAL_RATE * (seconds - mean)

    def learn_ttft(self, own: QueuedWork, modelled_s: float, took_s: float) -> None:
        """A request's first token took so long from its admission, for which the model alone predicted so much then.

        What the model of steps does not cover (the way to the worker and back, later requests in the same step) shows
        as a factor, of which a little is corrected each time. Of a burst all predictions are made before the first is
        put to the test, so the factor of that time does not matter.
        """
        is_cached = _is_cached(own)
        bias = self._bias[is_cached]
        error = math.log(max(took_s, _LEAST_S) / max(modelled_s, _LEAST_S) / bias)
        error = max(-_MAX_BIAS_STEP, min(_MAX_BIAS_STEP, error))
        self._bias[is_cached] = max(1 / _MAX_BIAS, min(_MAX_BIAS, bias * math.exp(_BIAS_RATE * error)))

    def learn_total(self, own: QueuedWork, predicted_s: float, took_s: float) -> None:
        """A request took so long from its admission to its last token, for which so much was predicted then."""
        kind = self._lateness.setdefault(_kind(own, predicted_s), _Lateness())
        kind.learn(took_s / max(predicted_s, _LEAST_S))

    def lateness(self, own: QueuedWork, predicted_s: float) -> float:
        """By which factor requests for which about as much was predicted are late, in all but a few cases.

        The first ones of a burst take much longer than predicted, since nobody knows what will follow, and the last
        ones do not; and what follows a prompt that is cached is likely to be cached. So each is compared with its
        like."""
        known = self._lateness.get(_kind(own, predicted_s))
        return _USUAL_LATENESS if known is None else known.factor

    def forget_lateness(self) -> None:
        """What was learned of whole requests' times is old."""
        self._lateness.clear()

    def predict(self, load: Load, own: QueuedWork, max_tokens: int, forks: QueuedWork = NO_WORK) -> Prediction | None:
        """For a request that arrives now, with so much work of its own, and ``forks`` after its first token; None while
        too little is known."""
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
        # Until there is a row for it, those that run go on.
        decodes = prefill.decodes + (steps - prefill.steps) * rows
        num_splits = max(0, prefill.steps - 1)
        work = StepWork(
            num_tokens,
            load.prefill_kv + ahead.kv + own.kv,
            decodes,
            decodes * kv_each,
            load.prefill_rows + ahead.chunks + own.chunks + num_splits,
            # A prompt that is split between two steps is read by the first of them in part.
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
        # What is reported is as true as can be; what is admitted by has its own measure of lateness.
        return Prediction(self._bias[_is_cached(own)] * ttft_s, total_s, total_s * self.lateness(own, total_s), ttft_s)

    def service_s(self, decodes: int, decode_kv: int, own: QueuedWork, max_tokens: int) -> float | None:
        """How long a request takes, first step to last token, if it begins now beside so many decoding rows."""
        steps = math.ceil(own.tokens / self._chunk(decodes, decode_kv, own.length))
        seconds = self._model.predict(_own_work(own, steps, decodes * steps, decode_kv * steps), steps)
        if seconds is None:
            return None
        length = self._lengths.expected(max_tokens)
        prompt_s = self._mean_prompt_s.get(_is_cached(own), math.inf)
        return seconds + self._decoding_s(decodes + max(1, own.rows), decode_kv + own.context, length, prompt_s)

    def alone_s(self, own: QueuedWork, max_tokens: int) -> float | None:
        """How long a request takes, first step to last token, with no other beside it."""
        chunks = math.ceil(own.tokens / self._chunk(0, 0, own.length))
        output = max(0.0, self._lengths.expected(max_tokens) - 1)
        steps = output / self._model.tokens_each
        decodes = steps * max(1, own.rows)
        kv = decodes * (own.length + output / 2)
        return self._model.predict(_own_work(own, chunks, decodes, kv), chunks + steps)

    def _prefill(self, load: Load, num_tokens: float, kv_each: float, length: float) -> "_Prefill":
        """The steps until all these tokens of prompts are computed, and the rows that are ahead decode."""
        # What begins in the next step does not slow that step down.
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
            # As some rows begin to decode, others have all of their output.
            ended = part_steps / output_steps if output_steps else 0.0
            after = min(load.max_rows, (running + joined) / (1 + ended))
            decodes += part_steps * (running + after) / 2
            steps += part_steps
            running = after
        rounded = math.ceil(steps - 1e-6)
        return _Prefill(rounded, decodes * rounded / steps, chunk, running)

    def _chunk(self, decodes: float, decode_kv: float, length: float) -> int:
        """Tokens of prompts in a step."""
        budget = max(1, self._budget - int(decodes))
        if int(decodes) == 0:
            return budget
        context = int(length) // 2
        return self._model.max_prefill(int(decodes), int(decode_kv), context, self._target_itl_s, budget)

    def _steps_to_row(self, load: Load, own: QueuedWork) -> int:
        """Until enough of the rows that run have ended for a request to begin that has so many others ahead of it."""
        num_ahead = int(load.ahead.rows)
        # Those ahead that have a row at once run as well.
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
        """Of each row, until so many have ended, of those that run and of those that take their places one after
        another."""
        num_rows = len(remaining)
        mean = sum(remaining) / num_rows
        shorter = self._lengths.expected(round(mean)) / mean if mean >= 1 else 1.0
        # Once it goes round evenly, as many end in the time of a whole output as there are rows.
        cycles = max(0, (num_ends - 1) // num_rows - 1)
        index = num_ends - 1 - cycles * num_rows
        successors = range(2 + index // num_rows)
        ends = sorted(left * shorter + number * self._mean_output for left in remaining for number in successors)
        return ends[index] + cycles * self._mean_output

    def _decoding_s(self, rows: float, kv: float, length: float, prompt_s: float) -> float:
        """What follows a first token: as many steps as the output needs, prolonged by others' prompts, each of which
        takes ``prompt_s``."""
        steps = max(0.0, length - 1) / self._model.tokens_each
        seconds = self._model.predict(StepWork(0, 0, rows * steps, kv * steps), steps)
        if seconds is None:
            return 0.0
        others_s = seconds * (self._model.slowdown - 1)
        if self._mean_output:
            # A row that ends may be followed by another prompt, which may be cached now. Half of them are taken to be.
            others_s = min(others_s, rows / 2 * prompt_s * length / self._mean_output)
        return seconds + others_s


class OutputLengths:
    """How long outputs would be if nothing limited them, in octaves: [1, 1], [2, 3], [4, 7] and so on.

    For each octave is counted how many outputs got there, and how many of these ended there by themselves. So an output
    that was cut short still tells of the lengths before.
    """

    _NUM_OCTAVES = 32

    def __init__(self) -> None:
        self._entered = [_PRIOR] * self._NUM_OCTAVES
        self._ended = [_PRIOR / 2] * self._NUM_OCTAVES

    def learn(self, length: int, ended: bool) -> None:
        """An output of ``length`` ended by itself, or was cut short there."""
        octave = max(1, length).bit_length() - 1
        for index in range(octave + 1):
            self._entered[index] += 1
        self._ended[octave] += ended
        if self._entered[0] > _MAX_KNOWN:
            self._entered = [count / 2 for count in self._entered]
            self._ended = [count / 2 for count in self._ended]

    def expected(self, limit: int) -> float:
        """The mean length of outputs that ``limit`` cuts short."""
        mean, alive, begin = 0.0, 1.0, 1
        for entered, ended in zip(self._entered, self._ended, strict=True):
            if begin > limit:
                break
            tokens = min(begin, limit - begin + 1)
            ending = ended / entered
            # Whoever got here has the octave's first token; of those that end in it, as many at each.
            mean += alive * (tokens - ending * tokens * (tokens - 1) / (2 * begin))
            alive *= 1 - ending
            begin *= 2
        return mean

    def long(self, limit: int, longer: float) -> int:
        """The length, at most ``limit``, that a share ``longer`` of the outputs exceeds."""
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
    """Requests of one kind: predictions that differ by a fifth at most, and prompts that are mostly
    cached, or mostly not."""
    return math.floor(4 * math.log2(max(predicted_s, _LEAST_S))), _is_cached(own)


def _is_cached(own: QueuedWork) -> bool:
    """Whether most of its prompt is cached, or shared with those ahead."""
    return own.tokens < _lengths(own) / 2


class _Lateness:
    """How much later than predicted requests ended."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque([_USUAL_LATENESS] * _NUM_RATIOS, maxlen=_NUM_RATIOS)
        self.factor = _USUAL_LATENESS
        """For all but a few of them."""

    def learn(self, ratio: float) -> None:
        """A request took so many times as long as predicted."""
        self._ratios.append(min(ratio, _MAX_LATENESS))
        self.factor = max(1.0, sorted(self._ratios)[-_NUM_LATER])


class _Prefill(NamedTuple):
    """How prompts are computed."""

    steps: int
    decodes: float
    """Rows that are continued in these steps, summed."""
    chunk: int
    """Tokens of prompts in the last of them."""
    rows: float
    """Rows that decode after them."""


def _lengths(work: QueuedWork) -> float:
    return work.context + work.pooled_context


def _own_work(own: QueuedWork, steps: int, decodes: float, decode_kv: float) -> StepWork:
    """That of one request, which is computed in so many steps, beside these decodes."""
    num_splits = max(0, steps - 1)
    chunk_kv = _lengths(own) + num_splits * own.length / 2
    return StepWork(own.tokens, own.kv, decodes, decode_kv, own.chunks + num_splits, chunk_kv, own.evicted_blocks)
