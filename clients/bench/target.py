"""The record of one request, and the interface for calling a service."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from penstock.clients.bench.workload import BenchRequest

OK, INTERRUPTED, NOT_SENT = "OK", "INTERRUPTED", "NOT_SENT"
"""Outcomes besides the names of gRPC's codes and HTTP statuses such as ``HTTP 429``."""


@dataclass(slots=True)
class Record:
    """One request as measured by the client. Times are those of ``time.perf_counter``."""

    request: BenchRequest
    sent_s: float
    late_s: float = 0.0
    """How late the request was sent."""
    message_s: "array[float]" = field(default_factory=lambda: array("d"))
    """The arrival time of each message with tokens."""
    message_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    """The number of tokens in each message."""
    token_ids: list[int] = field(default_factory=list)
    """The output; empty if the server does not send token ids."""
    ended_s: float = 0.0
    status: str = ""
    """``OK`` or the kind of failure; empty while the request runs."""
    reason: str = ""
    """The failure's name in the service's catalogue, if it gave one."""
    error: str = ""
    """The failure's message."""
    finish_reason: str = ""
    request_id: str = ""
    text: str = ""
    """Recorded only if the next turn needs it."""
    may_continue: bool = False
    prompt_tokens: int = 0
    """The server's count, for the whole context."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """The server's count, or else the number of tokens that arrived."""
    drafts: int = 0
    """The number of steps with drafts."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    predicted_ttft_s: float | None = None
    """The service's prediction when it accepted the request."""
    retry_after_s: float | None = None
    """How long a refused client should wait before it retries."""

    def tokens(self, now: float, token_ids: Sequence[int], num_tokens: int) -> None:
        self.message_s.append(now)
        self.message_tokens.append(num_tokens)
        self.token_ids += token_ids
        self.output_tokens += num_tokens

    def fail(self, now: float, status: str, error: str, reason: str = "") -> None:
        self.ended_s, self.status, self.error, self.reason = now, status, error, reason

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def failure(self) -> str:
        """The failure's status and the service's reason."""
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
        """Time per output token after the first message; None if there was only one message."""
        if len(self.message_s) < 2:
            return None
        # If a server does not report the tokens of each message, its total is more accurate.
        after_first = max(sum(self.message_tokens), self.output_tokens) - self.message_tokens[0]
        return (self.message_s[-1] - self.message_s[0]) / after_first

    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.message_s)]


class BenchTarget(Protocol):
    """A service under test."""

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        """Sends a request and records the response. ``past``: the earlier turns of its conversation. Returns when the
        request has ended; the record contains its failure, if any. Cancellation ends the request at the service too."""


def context(request: BenchRequest, past: Sequence[Record]) -> list[int]:
    """Returns the whole prompt of a turn: earlier prompts and answers, and the new part. An answer whose token ids are
    unknown is replaced by its turn's prompt, repeated to the answer's length: the same number of tokens, but none that
    is cached."""
    ids: list[int] = []
    for record in past:
        prompt = record.request.prompt_token_ids
        answer = record.token_ids or [prompt[i % len(prompt)] for i in range(record.output_tokens)]
        ids += [*prompt, *answer]
    return ids + list(request.prompt_token_ids)
