"""When a request's first and last token will come, by a fluid model of the queue. Knows counts and seconds alone.

All that is ahead of a request is work of the same worker, whoever's it is, so seconds add up:

- Steps pass until the prompts ahead and the request's own are computed, chunk by chunk, and until a row and its blocks
  are free, whichever is more. Each costs its constant, and what the rows cost that decode in it.
- To these come the tokens of the prompts, each once.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.scheduler.step_model import StepModel, StepWork

_PRUDENCE = 0.05
"""A request's own output is taken to be so long that only this share of the outputs known was longer."""
_NUM_RATIOS = 64
"""Requests that ended last, whose times are compared with what was predicted for them."""
_NUM_LATER = 4
"""The latest that is predicted is by the fourth worst of these."""
_MAX_LATENESS = 3.0
_MAX_KNOWN = 512
"""Outputs that are known; then they count half, so that new ones show."""
_PRIOR = 0.1
"""Outputs, half of which ended by themselves, that every length is taken to have been known by before the first."""


_RECENT_OUTPUTS = 64
"""That the mean output is about of: what ends a row now is what came lately."""
_BIAS_RATE = 0.1
"""Of the error of a time to the first token, what is corrected at once."""
_MAX_BIAS_STEP = 0.7
_MAX_BIAS = 4.0
"""However wrong predictions are."""
_LEAST_S = 1e-6
"""Of a time that others are held against: a model that knows little may predict none at all."""


@dataclass(slots=True)
class Load:
    """What there is to do when a request arrives."""

    in_flight_s: float
    """Until the plans in flight are answered, as predicted."""
    decodes: int
    decode_kv: int
    """Of the rows that decode: how many, and their lengths summed."""
    prefill_tokens: int
    """Of the rows that run: what is not planned yet of their histories."""
    ahead_requests: int
    ahead_tokens: int
    """What waits and will have a row sooner: how many with an output, and the tokens of all prompts."""
    remaining: Sequence[int]
    """Output tokens that each row that runs may still have at most, in any order."""
    free_rows: int
    max_rows: int
    free_blocks: int
    num_blocks: int
    block_size: int
    prefill_kv: int = 0
    """What ``prefill_tokens`` will see: how many tokens each of them, summed."""
    ahead_pooled: int = 0
    """What waits and will have a row sooner, but only until its prompt is computed."""
    ahead_pooled_tokens: int = 0
    """Of ``ahead_tokens``, those of these."""


class Prediction(NamedTuple):
    """Seconds from now."""

    ttft_s: float
    """To the first token."""
    total_s: float
    """To the last."""
    latest_s: float
    """To the last, in all but a few cases."""


class Forecast:
    """Predicts; and learns how long outputs are, which is often less than they may be."""

    def __init__(self, model: StepModel, budget: int, target_itl_s: float | None) -> None:
        self._model = model
        self._budget = budget
        self._target_itl_s = target_itl_s
        self._lengths = OutputLengths()
        self._ratios: deque[float] = deque(maxlen=_NUM_RATIOS)
        self.forget_lateness()
        self._bias = 1.0
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

    def learn_ttft(self, predicted_s: float, took_s: float) -> None:
        """A request's first token took so long from its admission, for which so much was predicted then.

        What the model of steps knows nothing of (the way to the worker and back, those who come later and are in the
        same step) shows as a factor, of which a little is corrected each time.
        """
        error = math.log(max(took_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        error = max(-_MAX_BIAS_STEP, min(_MAX_BIAS_STEP, error))
        self._bias = max(1 / _MAX_BIAS, min(_MAX_BIAS, self._bias * math.exp(_BIAS_RATE * error)))

    def learn_total(self, predicted_s: float, took_s: float) -> None:
        """A request took so long from its admission to its last token, for which so much was predicted then."""
        self._ratios.append(min(took_s / max(predicted_s, _LEAST_S), _MAX_LATENESS))
        self._lateness = max(1.0, sorted(self._ratios)[-_NUM_LATER])

    def forget_lateness(self) -> None:
        """What was learned of whole requests' times is old."""
        self._ratios.extend([1.0] * _NUM_RATIOS)
        self._lateness = 1.0

    def predict(
        self, load: Load, num_new_tokens: int, num_prompt_tokens: int, max_tokens: int, num_prompts: int = 1
    ) -> Prediction | None:
        """For a request that arrives now, and of whose prompts ``num_new_tokens`` are not cached; None while too little
        is known. Its prompts are taken to be of one length."""
        num_rows, length = len(load.remaining), num_prompt_tokens // num_prompts
        joining = max(0, min(load.max_rows, num_rows + load.ahead_requests) - load.decodes)
        kv_each = (load.decode_kv + load.prefill_tokens + load.ahead_tokens - load.ahead_pooled_tokens + length) / (
            num_rows + load.ahead_requests + 1
        )
        # Whoever is ahead decodes as soon as it has begun: of the steps until then, in half of them.
        decodes = load.decodes + joining / 2
        decode_kv = load.decode_kv + kv_each * joining / 2
        chunk = self._chunk(decodes, decode_kv, length)
        own_chunks = math.ceil(num_new_tokens / chunk)
        num_tokens = load.prefill_tokens + load.ahead_tokens + num_new_tokens
        num_turns = math.ceil((load.ahead_pooled + num_prompts) / load.max_rows)
        steps = max(math.ceil(num_tokens / chunk), num_turns, self._steps_to_row(load, length) + own_chunks)
        own = _prompts(num_new_tokens, num_prompt_tokens, own_chunks, num_prompts)
        seconds = self._model.predict(_sum(own, _prompts_ahead(load, chunk), decodes * steps, decode_kv * steps), steps)
        if seconds is None:
            return None
        rows = min(load.max_rows, num_rows + load.ahead_requests + 1)
        ttft_s = load.in_flight_s + seconds
        total_s = ttft_s + self._decoding_s(rows, kv_each * rows, self._lengths.long(max_tokens, _PRUDENCE))
        # What is told is as true as can be; what is admitted by has its own measure of lateness.
        return Prediction(self._bias * ttft_s, total_s, total_s * self._lateness)

    def service_s(
        self,
        load_decodes: int,
        load_decode_kv: int,
        num_new_tokens: int,
        num_prompt_tokens: int,
        max_tokens: int,
        num_prompts: int = 1,
    ) -> float | None:
        """How long a request takes, first step to last token, if it begins now beside so many decoding rows."""
        chunk = self._chunk(load_decodes, load_decode_kv, num_prompt_tokens // num_prompts)
        steps = math.ceil(num_new_tokens / chunk)
        own = _prompts(num_new_tokens, num_prompt_tokens, steps, num_prompts)
        seconds = self._model.predict(_sum(own, _NOTHING, load_decodes * steps, load_decode_kv * steps), steps)
        if seconds is None:
            return None
        length = self._lengths.expected(max_tokens)
        return seconds + self._decoding_s(load_decodes + 1, load_decode_kv + num_prompt_tokens, length)

    def alone_s(
        self, num_new_tokens: int, num_prompt_tokens: int, max_tokens: int, num_prompts: int = 1
    ) -> float | None:
        """How long a request takes, first step to last token, with no other beside it."""
        chunk = self._chunk(0, 0, num_prompt_tokens // num_prompts)
        chunks = math.ceil(num_new_tokens / chunk)
        output = max(0.0, self._lengths.expected(max_tokens) - 1)
        decodes = output / self._model.tokens_each
        kv = decodes * (num_prompt_tokens + output / 2)
        own = _prompts(num_new_tokens, num_prompt_tokens, chunks, num_prompts)
        return self._model.predict(_sum(own, _NOTHING, decodes, kv), chunks + decodes)

    def _chunk(self, decodes: float, decode_kv: float, num_prompt_tokens: int) -> int:
        """Tokens of prompts in a step."""
        budget = max(1, self._budget - int(decodes))
        if int(decodes) == 0:
            return budget
        context = num_prompt_tokens // 2
        return self._model.max_prefill(int(decodes), int(decode_kv), context, self._target_itl_s, budget)

    def _steps_to_row(self, load: Load, num_prompt_tokens: int) -> int:
        """Until enough of the rows that run have ended for a request to begin that has so many others ahead of it."""
        # Those ahead that have a row at once run as well.
        remaining = [*load.remaining, *[self._mean_output] * min(load.free_rows, load.ahead_requests)]
        num_rows = len(remaining)
        if not num_rows:
            return 0
        missing_rows = load.ahead_requests + 1 - load.free_rows
        held_tokens = load.ahead_tokens - load.ahead_pooled_tokens + num_prompt_tokens
        needed_blocks = held_tokens / load.block_size + load.ahead_requests + 1
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

    def _decoding_s(self, rows: float, kv: float, length: float) -> float:
        """What follows a first token: as many steps as the output needs, prolonged by others' prompts."""
        steps = max(0.0, length - 1) / self._model.tokens_each
        seconds = self._model.predict(StepWork(0, 0, rows * steps, kv * steps), steps)
        return 0.0 if seconds is None else seconds * self._model.slowdown


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


_NOTHING = StepWork(0, 0, 0, 0)


def _prompts(num_new_tokens: int, num_prompt_tokens: int, chunks: int, num_prompts: int) -> StepWork:
    """The last tokens of one prompt or of several of one length, in so many chunks or one for each at least."""
    mean_context = (num_prompt_tokens - num_new_tokens / 2) / num_prompts
    chunks = max(chunks, num_prompts)
    return StepWork(num_new_tokens, num_new_tokens * mean_context, 0, 0, chunks, chunks * mean_context)


def _prompts_ahead(load: Load, chunk: int) -> StepWork:
    """Of the rows that run, and of those that will begin sooner."""
    kv: float = load.prefill_kv
    chunks = math.ceil(load.prefill_tokens / chunk)
    chunk_kv = kv / chunk
    num_ahead = load.ahead_requests + load.ahead_pooled
    if num_ahead:
        kv += load.ahead_tokens * load.ahead_tokens / num_ahead / 2
        chunks += num_ahead
        chunk_kv += load.ahead_tokens
    return StepWork(load.prefill_tokens + load.ahead_tokens, kv, 0, 0, chunks, chunk_kv)


def _sum(one: StepWork, other: StepWork, decodes: float, decode_kv: float) -> StepWork:
    return StepWork(
        one.prefill_tokens + other.prefill_tokens,
        one.prefill_kv + other.prefill_kv,
        decodes,
        decode_kv,
        one.chunks + other.chunks,
        one.chunk_kv + other.chunk_kv,
    )
