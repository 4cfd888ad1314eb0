"""Predicts the time of a step, and learns while the service runs. It sees work and seconds, not rows or requests.

The model of a step's time is

    constant + a * prefill_tokens + b * prefill_kv + c * decodes + d * decode_kv + e * chunks + f * chunk_kv
    + g * drafts + the sum over BENDS of h * max(0, decodes - bend)

with no coefficient below zero, times a pace. From some number of decoding rows on, a step computes for longer than it
reads its weights, and each row costs more. The coefficients minimize the squares of the relative errors, and older
steps count less and less. The pace is that of the last few steps, because a machine may be busy with other things too.
Blocks that are copied between the tiers of the KV cache are added, at the time that the worker measured for one.

The worker decides how much a step drafts, which is known only from its result. Until then the model assumes that each
decoding row has as many drafts, and gains as many tokens, as such rows did recently.
"""

import math
from collections import deque
from collections.abc import Sequence
from operator import mul
from statistics import median
from typing import NamedTuple

from penstock.scheduler.plan import StepPlan
from penstock.scheduler.worker_config import MeasuredStep

MIN_CHUNK = 16
"""The minimum number of prompt tokens in a step, whatever its target: a prompt always makes progress."""

COMFORT_S = 0.12
"""The time between a row's tokens if no target is set: streamed text still reads as fluent."""
MIN_SHARE = 2
"""Without a target, a step with chunks may always take this many times as long as only its decodes. Otherwise prompts
would hardly make progress on a slow machine."""

BENDS = (4, 16, 64)
"""Numbers of decoding rows beyond which each one may cost more. They approximate a bend at any number."""

_MIN_STEPS = 4
"""The number of steps before the first prediction: the first steps are not like the others."""
_FIT_EVERY = 8
"""The number of steps between fits, unless one was a surprise."""
_SURPRISE = 0.25
"""A prediction with a larger relative error causes a fit at once."""
_MEMORY = 256
"""The number of steps of a kind after which one counts 1/e."""
_PACED_BY = 16
"""The number of steps that determine the pace."""
_MAX_PACE = 4.0
_SLOWED_BY = 128
"""The number of steps after which one counts 1/e for how much chunks slow decoding down."""
_DRAFTED_BY = 32
"""The number of steps after which one counts 1/e for how much is drafted and accepted."""
_SWEEPS = 8
"""The number of sweeps over the coefficients in a fit. They start from the last values, so they need not converge."""
_DAMPING = 1e-3
"""A coefficient that was hardly ever needed moves slowly, so that noise cannot drive it far."""
_SCALES = (1.0, 1e-2, 1e-5, 1e-1, 1e-4, 1.0, 1e-4, 1e-1, *(1e-1 for _ in BENDS))
"""Scales of the terms above, in their order, which bring them all to about 1."""
_OF_DECODES = (3, 4, 7, *range(8, 8 + len(BENDS)))
"""The indices of the terms of decoding rows."""


class StepWork(NamedTuple):
    """The work of one or several steps. Whole numbers, except in estimates."""

    prefill_tokens: float
    """Tokens in chunks of histories."""
    prefill_kv: float
    """The number of tokens that each of these attends to, summed."""
    decodes: float
    """Decoding rows."""
    decode_kv: float
    """Their lengths, summed."""
    chunks: float = 0
    chunk_kv: float = 0
    """The chunks' ends, summed: the KV that is read for them, however few tokens they have."""
    copied_blocks: float = 0
    """Blocks copied between the tiers of the KV cache, in either direction."""

    @classmethod
    def of(cls, plan: StepPlan, decode_kv: int) -> "StepWork":
        """Returns the work of a plan whose decoding rows have ``decode_kv`` tokens in total."""
        tokens = kv = end = 0
        for chunk in plan.chunks:
            num = chunk.end - chunk.start
            tokens += num
            kv += num * (chunk.start + chunk.end) // 2
            end += chunk.end
        copied = len(plan.copies_out) + len(plan.copies_in)
        return cls(tokens, kv, len(plan.decodes), decode_kv, len(plan.chunks), end, copied)

    @classmethod
    def measured(cls, step: MeasuredStep) -> "StepWork":
        """Returns the work of a step that a worker measured at its start."""
        tokens = step.chunks * (step.end - step.start)
        kv = tokens * (step.start + step.end) // 2
        chunks = step.chunks if tokens else 0
        return cls(tokens, kv, step.decodes, 2 * step.decodes, chunks, chunks * step.end)


class DecodeCosts(NamedTuple):
    """The seconds that decoding rows take of a step."""

    row_s: float
    """Each row."""
    position_s: float
    """Each position of a row's history."""
    draft_s: float
    """Each draft."""


class _Moments:
    """Sums over steps, weighted by age: the products of the terms with each other, and with the time."""

    def __init__(self) -> None:
        self.products = [[0.0] * len(_SCALES) for _ in _SCALES]
        self.sums = [0.0] * len(_SCALES)
        self.new: list[tuple[Sequence[float], float]] = []
        """The terms and the time of each step that is not added yet, weighted."""

    def add_new(self) -> None:
        """Adds the new steps."""
        keep = math.exp(-len(self.new) / _MEMORY)
        self.sums = [keep * value for value in self.sums]
        self.products = [[keep * value for value in row] for row in self.products]
        for terms, time in self.new:
            for index, term in enumerate(terms):
                if term:
                    self.sums[index] += term * time
                    row = self.products[index]
                    self.products[index] = [value + term * other for value, other in zip(row, terms, strict=True)]
        self.new.clear()


class StepTimeModel:
    """Predicts the time of a step from those of earlier ones.

    Errors are relative, so a single step that took far too long hardly counts, even the first one.
    """

    def __init__(self, copy_s: float = 0.0) -> None:
        """``copy_s``: the time to copy one block."""
        self._copy_s = copy_s
        self._coefficients = [0.0] * len(_SCALES)
        self._num_steps = 0
        # Separate, so that a long time of decoding does not erase the knowledge of chunks.
        self._decoding, self._chunked = _Moments(), _Moments()
        self._last: deque[tuple[Sequence[float], float]] = deque(maxlen=_PACED_BY)
        self._pace = 1.0
        # Means over the steps with decoding rows: predictions for the whole step, and for only these rows.
        self._whole_s = self._decoding_s = 0.0
        self._drafts_each = 0.0
        self.tokens_each = 1.0
        """The mean number of tokens that a row recently gained per step that continued it: more than one if drafts were
        accepted."""

    @property
    def slowdown(self) -> float:
        """The factor by which chunks have recently prolonged the steps of decoding rows."""
        return self._whole_s / self._decoding_s if self._decoding_s > 0 else 1.0

    def observe(self, work: StepWork, seconds: float, num_drafted: int = 0, num_accepted: int = 0) -> None:
        """Learns from a step with this work and these drafts, which took ``seconds``; takes about 20 us."""
        terms = _terms(work, 1, num_drafted)
        # The time of copies is less certain than the step's own time, so they count as at most half of it.
        seconds = max(seconds - work.copied_blocks * self._copy_s, seconds / 2, 1e-6)
        predicted = _dot(self._coefficients, terms)
        self._last.append((terms, seconds))
        surprise = abs(predicted / seconds - 1) > _SURPRISE
        if work.decodes:
            decoding = predicted
            if work.chunks:
                alone = _terms(StepWork(0, 0, work.decodes, work.decode_kv), 1, num_drafted)
                decoding = _dot(self._coefficients, alone)
            self._whole_s += (predicted - self._whole_s) / _SLOWED_BY
            self._decoding_s += (decoding - self._decoding_s) / _SLOWED_BY
            self._drafts_each += (num_drafted / work.decodes - self._drafts_each) / _DRAFTED_BY
            self.tokens_each += (1 + num_accepted / work.decodes - self.tokens_each) / _DRAFTED_BY
        new = (self._chunked if work.chunks else self._decoding).new
        # Errors are relative to the prediction, for a mean without bias, which is limited to half or twice the time.
        about = min(max(predicted, seconds / 2), seconds * 2)
        new.append(([term / about for term in terms], seconds / about))
        self._num_steps += 1
        if surprise or len(self._chunked.new) + len(self._decoding.new) >= _FIT_EVERY:
            self._fit()

    def predict(self, work: StepWork, steps: float = 1, *, drafts: float | None = None) -> float | None:
        """Returns the seconds for this work in ``steps`` steps together, with ``drafts``, or with as many as usual;
        None while too little is known."""
        if self._num_steps < _MIN_STEPS:
            return None
        if drafts is None:
            drafts = self._drafts_each * work.decodes
        return self._pace * _dot(self._coefficients, _terms(work, steps, drafts)) + work.copied_blocks * self._copy_s

    def decode_costs(self, decodes: int, decode_kv: int, base_s: float) -> DecodeCosts:
        """Returns what each of these rows costs of a step that decodes them all and takes ``base_s`` without them; zero
        while too little is known. In a steady load the model cannot distinguish a step's constant cost from that of its
        rows. So the rows share whatever is beyond ``base_s``."""
        whole_s = self.predict(StepWork(0, 0, decodes, decode_kv), drafts=0)
        if not decodes or whole_s is None:
            return DecodeCosts(0.0, 0.0, 0.0)
        rows_s = max(0.0, whole_s - base_s)
        row, position, draft, *bent = (self._pace * self._coefficients[index] * _SCALES[index] for index in _OF_DECODES)
        row += _dot(bent, num_bent(decodes, 1)) / decodes
        modelled = row * decodes + position * decode_kv
        if modelled <= 0.0:
            return DecodeCosts(rows_s / decodes, 0.0, draft)
        return DecodeCosts(rows_s * row / modelled, rows_s * position / modelled, draft)

    def max_prefill(self, decodes: int, decode_kv: int, context: int, target_s: float | None, at_most: int) -> int:
        """Returns the maximum number of tokens of a history, of which ``context`` are computed, that a step can compute
        beside these decodes within ``target_s``: ``MIN_CHUNK`` to ``at_most``, and ``at_most`` while too little is
        known. If ``target_s`` is None, the target is ``COMFORT_S``, or ``MIN_SHARE`` times the time of the decodes if
        that is longer."""
        rest = self.predict(StepWork(0, 0, decodes, decode_kv, 1, context))
        if rest is None:
            return at_most
        if target_s is None:
            target_s = max(COMFORT_S, MIN_SHARE * (self.predict(StepWork(0, 0, decodes, decode_kv)) or 0.0))
        per_token, per_kv, per_end = (self._pace * self._coefficients[index] * _SCALES[index] for index in (1, 2, 6))
        # rest + linear * n + square * n^2 = target_s, as the mean token of the chunk sees context + n / 2 tokens.
        linear, square = per_token + per_kv * context + per_end, per_kv / 2
        left = target_s - rest
        if left <= 0:
            tokens = 0.0
        elif linear <= 0 and square <= 0:
            tokens = at_most
        else:
            # This form of the root loses no precision where the square hardly counts.
            tokens = 2 * left / (linear + math.sqrt(linear * linear + 4 * square * left))
        return max(min(MIN_CHUNK, at_most), min(at_most, int(tokens)))

    def _fit(self) -> None:
        self._decoding.add_new()
        self._chunked.add_new()
        sums = [one + other for one, other in zip(self._decoding.sums, self._chunked.sums, strict=True)]
        products = [
            [one + other for one, other in zip(row, others, strict=True)]
            for row, others in zip(self._decoding.products, self._chunked.products, strict=True)
        ]
        damping = [_DAMPING * products[index][index] for index in range(len(_SCALES))]
        # Coordinate descent, starting from the last fit.
        coefficients = self._coefficients
        for _ in range(_SWEEPS):
            for index, row in enumerate(products):
                weight = row[index] + damping[index]
                if weight > 0:
                    change = (sums[index] - _dot(row, coefficients)) / weight
                    coefficients[index] = max(0.0, coefficients[index] + change)
        pace = median(seconds / max(_dot(coefficients, terms), 1e-9) for terms, seconds in self._last)
        self._pace = min(max(pace, 1 / _MAX_PACE), _MAX_PACE)


def step_features(work: StepWork, steps: float, drafts: float) -> tuple[float, ...]:
    """Returns what each cost is multiplied with, without the bends: the number of steps, their work and drafts."""
    return (steps, *work[:-1], drafts)


def num_bent(decodes: float, steps: float) -> list[float]:
    """Returns the number of rows beyond each of ``BENDS``, for decoding rows that are spread evenly over steps."""
    return [max(0.0, decodes - bend * steps) for bend in BENDS]


def _terms(work: StepWork, steps: float, drafts: float) -> tuple[float, ...]:
    return tuple(map(mul, _SCALES, (*step_features(work, steps, drafts), *num_bent(work.decodes, steps))))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(mul, one, other), 0.0)
