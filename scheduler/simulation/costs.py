"""What steps cost in a simulation: the worker's seconds by the work of a step, and the service's own."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from penstock.scheduler.timing.step_time import StepWork

REQUEST_S, MESSAGE_S = 0.0006, 0.0004
"""The usual times of a request and of a message on their way, through gRPC on one machine. A step log lacks them."""


class StepCosts(NamedTuple):
    """The seconds of a step: the first number for the step itself, the others for each unit of its work, as in
    ``StepWork``."""

    constant: float = 0.0
    prefill_tokens: float = 0.0
    prefill_kv: float = 0.0
    decodes: float = 0.0
    decode_kv: float = 0.0
    chunks: float = 0.0
    chunk_kv: float = 0.0
    drafts: float = 0.0
    bent_decodes: float = 0.0
    """What each decoding row beyond ``bend`` costs more, because the step then computes for longer than it reads."""
    bend: float = 0.0
    """A number of decoding rows."""

    def seconds(self, work: StepWork, drafts: float = 0.0) -> float:
        """Returns the seconds of a step with this work and ``drafts``."""
        constant, per_token, per_kv, per_row, per_position, per_chunk, per_end, per_draft, per_bent, bend = self
        seconds = per_bent * max(0.0, work.decodes - bend)
        seconds += constant + per_row * work.decodes + per_position * work.decode_kv + per_draft * drafts
        if work.chunks:
            seconds += per_token * work.prefill_tokens + per_kv * work.prefill_kv
            seconds += per_chunk * work.chunks + per_end * work.chunk_kv
        return seconds


UNITS = StepCosts._fields[1:-2]
"""The names of the units of a step's work."""


class MeasuredFactor(NamedTuple):
    """The time of a step by its predicted time."""

    at_s: float
    """How long the worker had computed steps of this kind when the step ended, from the start of the log."""
    factor: float


@dataclass(frozen=True)
class StepNoise:
    """How much steps differ from their predicted time: factors that were measured, in the order of their times.

    They are replayed by time, again and again, and not drawn for each step: what slows a machine down lasts longer than
    a step, and queues grow meanwhile. Only the time in which the worker computes steps of the same kind counts.
    Otherwise the step after each pause, or after each long step with a prompt, would be replayed for as long as that
    took, and such steps are slow.
    """

    decoding: Sequence[MeasuredFactor] = (MeasuredFactor(0.0, 1.0),)
    """The factors of steps without prompts."""
    chunked: Sequence[MeasuredFactor] = (MeasuredFactor(0.0, 1.0),)
    """The factors of steps with prompts."""

    def factor(self, when: float, has_chunks: bool) -> float:
        """Returns the factor after this many seconds of computing steps of the kind."""
        factors = self._factors(has_chunks)
        index = bisect_right(factors, when % (self.seconds(has_chunks) or 1.0), key=itemgetter(0))
        return factors[index % len(factors)].factor

    def seconds(self, has_chunks: bool) -> float:
        """Returns the time of computing steps of the kind for which factors were measured."""
        return self._factors(has_chunks)[-1].at_s

    def _factors(self, has_chunks: bool) -> Sequence[MeasuredFactor]:
        return self.chunked if has_chunks else self.decoding


@dataclass(frozen=True)
class ServiceCosts:
    """The seconds that pass outside of the worker. The service handles one result after another."""

    submit_s: float = 0.0
    """The time from when a plan is made until the worker has it."""
    answer_s: float = 0.0
    """The time from the end of a step until the service has its result."""
    handle_s: float = 0.0
    """The time to apply a result, to make the next plan and to send messages."""
    handle_row_s: float = 0.0
    """The same, for each row of the result."""
    request_s: float = 0.0
    """The time from when a client sends a request until it is in the queue."""
    message_s: float = 0.0
    """The time from when a message is sent until the client has it."""

    def handling_s(self, num_rows: int) -> float:
        """Returns the time to handle a result with these rows."""
        return self.handle_s + self.handle_row_s * num_rows


NO_SERVICE_COSTS = ServiceCosts()
"""Only steps take time."""


@dataclass(frozen=True)
class DraftRates:
    """How much is drafted."""

    per_row: float = 0.0
    """The mean number of drafts of a decoding row in a step."""
    accepted: float = 0.0
    """The share of them that is accepted."""
    most: int = 0
    """The maximum number of drafts of a row in a step."""


@dataclass(frozen=True)
class SimulatedCosts:
    """All that a simulation needs to know about time."""

    step: StepCosts
    noise: StepNoise = StepNoise()
    service: ServiceCosts = ServiceCosts()
    drafts: DraftRates = DraftRates()
    copy_s: float = 0.0
    """The time to copy one block between the tiers of the KV cache."""
