"""What is noted of one request, and what a way to call a service promises."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.clients.bench.workload import BenchRequest

OK, INTERRUPTED, NOT_SENT = "OK", "INTERRUPTED", "NOT_SENT"
"""Outcomes besides the names of gRPC's codes and ``HTTP 429`` and its like."""


@dataclass(slots=True)
class Record:
    """One request as its caller saw it. Times are of ``time.perf_counter``."""

    request: BenchRequest
    sent_s: float
    late_s: float = 0.0
    """How long after its time it was sent."""
    message_s: "array[float]" = field(default_factory=lambda: array("d"))
    """When each message with tokens came."""
    message_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    """How many tokens it brought."""
    token_ids: list[int] = field(default_factory=list)
    """The output; empty where the server doesn't tell them."""
    ended_s: float = 0.0
    status: str = ""
    """``OK``, or how it failed; empty while it runs."""
    reason: str = ""
    """The failure's name in the service's catalogue, if it gave one."""
    error: str = ""
    """The failure in words."""
    finish_reason: str = ""
    request_id: str = ""
    text: str = ""
    """Noted only where the next turn needs it."""
    may_continue: bool = False
    prompt_tokens: int = 0
    """As the server counts them, those of the whole context."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; else those that came."""
    drafts: int = 0
    """Steps that had some."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    predicted_ttft_s: float | None = None
    """What the service foretold when it took the request."""
    retry_after_s: float | None = None
    """How long the service asked a refused client to wait."""

    def tokens(self, now: float, token_ids: Sequence[int], num_tokens: int) -> None:
        """A message with tokens came."""
        self.message_s.append(now)
        self.message_tokens.append(num_tokens)
        self.token_ids += token_ids
        self.output_tokens += num_tokens

    def fail(self, now: float, status: str, error: str, reason: str = "") -> None:
        """It ended badly."""
        self.ended_s, self.status, self.error, self.reason = now, status, error, reason

    @property
    def is_ok(self) -> bool:
        """Whether it was answered whole."""
        return self.status == OK

    @property
    def failure(self) -> str:
        """How it failed: the status, and the service's own name for it."""
        return f"{self.status} {self.reason}".strip()

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first token."""
        return self.message_s[0] - self.sent_s if self.message_s else None

    @property
    def e2e_s(self) -> float:
        """Time from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first message; None if there was one message alone."""
        if len(self.message_s) < 2:
            return None
        # Where a server doesn't say how many tokens a message has, its own count of all of them is the better one.
        after_first = max(sum(self.message_tokens), self.output_tokens) - self.message_tokens[0]
        return (self.message_s[-1] - self.message_s[0]) / after_first

    def gaps_s(self) -> list[float]:
        """Times between messages."""
        return [later - earlier for earlier, later in zip(self.message_s, self.message_s[1:], strict=False)]


class BenchTarget(Protocol):
    """A way to call a service."""

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        """Sends a request, whose conversation had the turns ``past``, and notes all that comes. Returns when it has
        ended, well or not; what went wrong is in the record. When cancelled, it ends the request at the service too."""


def context(request: BenchRequest, past: Sequence[Record]) -> list[int]:
    """The whole prompt of a turn: all that was said before, and what is new. In place of an answer whose token ids are
    unknown stands the prompt of its turn, repeated to the answer's length: as many tokens, but none that is cached."""
    ids: list[int] = []
    for record in past:
        prompt = record.request.prompt_token_ids
        answer = record.token_ids or [prompt[i % len(prompt)] for i in range(record.output_tokens)]
        ids += [*prompt, *answer]
    return ids + list(request.prompt_token_ids)
