"""The results of ``penstock bench``: times, throughput, goodput, failures, and the client's own load."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from penstock.clients.bench.target import INTERRUPTED, NOT_SENT, Record

BUSY_SHARE = 0.8
"""The share of a core above which the client's own delays distort its measurements."""

_TOKEN_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "drafted_tokens", "accepted_tokens")
_UNITS = {"ms": 1e-3, "s": 1.0, "us": 1e-6}


@dataclass(frozen=True)
class Slo:
    """The limits within which a request counts as goodput, in seconds; None: unlimited."""

    ttft: float | None = None
    """Time to first token."""
    itl: float | None = None
    """The longest time between two messages."""
    tpot: float | None = None
    """Time per output token after the first message."""
    e2e: float | None = None
    """Time to the end of the request."""

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parses limits such as ``ttft=500ms,itl=50ms,e2e=5s``. Raises ValueError, which lists the names."""
        names = [each.name for each in fields(cls)]
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            number = value.rstrip("mus")
            try:
                bound = float(number) * _UNITS[value[len(number) :]]
            except (ValueError, KeyError):
                bound = 0.0
            if name not in names or name in bounds or not bound > 0:
                raise ValueError(f"expected bounds of {', '.join(names)}, such as ttft=500ms,itl=50ms; got {part!r}")
            bounds[name] = bound
        return cls(**bounds)

    def is_kept(self, record: Record) -> bool:
        """Whether the request succeeded within the limits. A refused one never does."""
        if not record.is_ok or record.ttft_s is None:
            return False
        pairs = (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.e2e, record.e2e_s),
            (self.itl, max(record.gaps_s(), default=None) if self.itl is not None else None),
        )
        return all(bound is None or value is None or value <= bound for bound, value in pairs)


@dataclass(frozen=True)
class ClientLoad:
    """The CPU time that the client used, as shares of one core."""

    loop_share: float
    """The event loop's thread, over the whole run."""
    busiest_second_share: float
    """The event loop's thread, in its busiest second."""
    process_share: float
    """All threads of the process, including gRPC's."""


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Summarises a distribution; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    percentiles = {f"p{percent}": quantile(ordered, percent / 100) for percent in (50, 90, 99)}
    return {"count": len(ordered), "mean": statistics.fmean(ordered), **percentiles, "max": ordered[-1]}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns a quantile of one or more values in ascending order, with linear interpolation."""
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Report:
    """The results of a run."""

    records: list[Record] = field(repr=False)
    began_s: float
    """The start, by ``time.perf_counter``."""
    ended_s: float
    client: ClientLoad
    was_stopped: bool = False
    """Whether the run was interrupted."""

    @property
    def seconds(self) -> float:
        """The time from the start to the end of the last request."""
        return max(1e-9, self.ended_s - self.began_s)

    @property
    def ok(self) -> list[Record]:
        return [record for record in self.records if record.is_ok]

    @property
    def failures(self) -> Counter[str]:
        """The numbers of failed and refused requests, by status and the service's reason."""
        return Counter(record.failure for record in self.records if not record.is_ok)

    def summary(self, slo: Slo | None = None) -> dict[str, Any]:
        """Returns all figures by name; times are in seconds. docs/bench.md describes them."""
        sent = [record for record in self.records if record.status != NOT_SENT]
        prompt_tokens = sum(record.prompt_tokens for record in sent)
        output_tokens = sum(record.output_tokens for record in sent)
        refused = [r.e2e_s for r in sent if not r.is_ok and r.status != INTERRUPTED]
        summary: dict[str, Any] = {
            "seconds": self.seconds,
            "was_stopped": self.was_stopped,
            "requests": {"sent": len(sent), "ok": len(self.ok), "failed": self._failed()},
            "requests_per_s": len(self.ok) / self.seconds,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": sum(record.cached_tokens for record in sent),
            "output_tokens": output_tokens,
            "prompt_tokens_per_s": prompt_tokens / self.seconds,
            "output_tokens_per_s": output_tokens / self.seconds,
            "times_s": {name: spread(values) for name, values in self.times().items()},
            "failed_after_s": spread(refused),
            "sent_late_s": spread(r.late_s for r in sent if r.request.arrival_s is not None),
            "predicted_ttft": self._predictions(),
            "speculation": _speculation(sent),
            "client": {**asdict(self.client), "is_limit": self.client.busiest_second_share > BUSY_SHARE},
        }
        if slo is not None:
            good = sum(map(slo.is_kept, self.records))
            bounds = {name: bound for name, bound in asdict(slo).items() if bound is not None}
            share = good / len(self.records) if self.records else 0.0
            summary["goodput"] = {"slo_s": bounds, "ok": good, "share": share, "requests_per_s": good / self.seconds}
        return summary

    def times(self) -> dict[str, list[float]]:
        """The values of each measured time, from requests that succeeded."""
        done = self.ok
        return {
            "ttft": [record.ttft_s for record in done if record.ttft_s is not None],
            "itl": [gap for record in done for gap in record.gaps_s()],
            "tpot": [record.tpot_s for record in done if record.tpot_s is not None],
            "e2e": [record.e2e_s for record in done],
        }

    def requests(self) -> list[dict[str, Any]]:
        """Returns each request as a JSON object; times are in seconds from the start of the run."""
        return [self._request(record) for record in self.records]

    def _failed(self) -> dict[str, dict[str, Any]]:
        """The failures, most frequent first, each with its first error message."""
        messages = {record.failure: record.error for record in reversed(self.records)}
        return {failure: {"count": count, "error": messages[failure]} for failure, count in self.failures.most_common()}

    def _predictions(self) -> dict[str, float] | None:
        """The errors of the service's predicted times to first token, relative to the real ones."""
        pairs = [(r.predicted_ttft_s, r.ttft_s) for r in self.ok]
        return spread(abs(predicted - real) / real for predicted, real in pairs if predicted is not None and real)

    def _request(self, record: Record) -> dict[str, Any]:
        request = record.request
        return {
            "number": request.number,
            "conversation": request.conversation or None,
            "status": record.status,
            **{name: getattr(record, name) or None for name in ("reason", "error", "finish_reason", "request_id")},
            "new_prompt_tokens": len(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            **{name: getattr(record, name) for name in _TOKEN_COUNTS},
            "arrival_s": request.arrival_s,
            "sent_s": round(record.sent_s - self.began_s, 6),
            "ended_s": round(record.ended_s - self.began_s, 6),
            "predicted_ttft_s": record.predicted_ttft_s,
            "message_s": [round(when - self.began_s, 6) for when in record.message_s],
            "message_tokens": list(record.message_tokens),
            "token_ids": record.token_ids or None,
        }


def _speculation(records: Iterable[Record]) -> dict[str, Any] | None:
    """The draft statistics of all requests; None if there were no drafts."""
    drafts, drafted, accepted = (
        sum(getattr(record, name) for record in records) for name in ("drafts", "drafted_tokens", "accepted_tokens")
    )
    if not drafts:
        return None
    return {
        "drafts": drafts,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "accepted_share": accepted / drafted,
        "mean_length": 1 + accepted / drafts,
    }
