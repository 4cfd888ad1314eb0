"""The headers by which llm-d and the Gateway API Inference Extension describe a request: tenant, priority, targets and
session. The names are the same for HTTP headers and gRPC metadata.

Some also have an older name, which applies if the newer one is missing. Independent of HTTP and gRPC.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FAIRNESS_ID = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTFT_SLO = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_SLO = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
SESSION_ID = ("x-session-id",)
REQUEST_ID = ("x-request-id",)
ROUTING_HEADERS = frozenset((*FAIRNESS_ID, *OBJECTIVE, *TTFT_SLO, *TPOT_SLO, *SESSION_ID, *REQUEST_ID))

MAX_ID_BYTES = 128
MAX_TTFT_MS, MAX_TPOT_MS = 86_400_000, 60_000
MAX_PRIORITY = 1000
MAX_OBJECTIVES = 1000
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MILLISECONDS = re.compile(r"[0-9]{1,8}")
_PRIORITY = re.compile(r"[+-]?[0-9]{1,4}")

Objectives = Mapping[str, int]
"""The operator's priorities, by the names of objectives."""


class RoutingHeaderError(Exception):
    """A header has an invalid value. The text names the header and a valid value."""

    def __init__(self, header: str, problem: str) -> None:
        super().__init__(f"{header}: {problem}")
        self.header = header
        self.problem = problem


@dataclass(frozen=True, slots=True)
class RoutingHeaders:
    """The values of the headers of one request or call; empty or None if a header is absent."""

    fairness_id: str = ""
    """The tenant that the request is made for. Valid only if its caller may act for others."""
    fairness_name: str = ""
    """The name of the header that has it."""
    objective: str = ""
    ttft_slo_ms: int | None = None
    tpot_slo_ms: int | None = None
    session_id: str = ""
    request_id: str = ""

    @classmethod
    def read(cls, headers: Iterable[tuple[str, Any]]) -> "RoutingHeaders":
        """Reads headers, whose names are in lower case. Raises RoutingHeaderError. A request id that is too long or not
        printable is ignored, because proxies generate their own."""
        found: dict[str, str] = {}
        for name, value in headers:
            if name not in ROUTING_HEADERS or not isinstance(value, str) or not value.strip():
                continue
            if found.setdefault(name, value.strip()) != value.strip() and name not in REQUEST_ID:
                raise RoutingHeaderError(name, "has several values; send one")
        if not found:
            return NO_HEADERS
        request_id = _first(found, REQUEST_ID)[1]
        fairness_name, fairness_id = _first(found, FAIRNESS_ID)
        session, session_id = _first(found, SESSION_ID)
        if session_id and not _is_id(session_id):
            raise RoutingHeaderError(session, f"must be at most {MAX_ID_BYTES} characters of printable ASCII")
        return cls(
            fairness_id=fairness_id,
            fairness_name=fairness_name,
            objective=_first(found, OBJECTIVE)[1],
            ttft_slo_ms=_milliseconds(*_first(found, TTFT_SLO), MAX_TTFT_MS),
            tpot_slo_ms=_milliseconds(*_first(found, TPOT_SLO), MAX_TPOT_MS),
            session_id=session_id,
            request_id=request_id if _is_id(request_id) else "",
        )

    @property
    def tenant(self) -> str:
        """The tenant, for a caller that may act for others. Raises RoutingHeaderError."""
        if self.fairness_id and not TENANT_NAME.fullmatch(self.fairness_id):
            raise RoutingHeaderError(self.fairness_name, "must be a tenant: 1 to 64 characters of [A-Za-z0-9_.-]")
        return self.fairness_id

    def priority(self, objectives: Objectives) -> int | None:
        """Returns the priority of the objective: the operator's, or the number itself; None for any other name."""
        if self.objective in objectives:
            return objectives[self.objective]
        if not _PRIORITY.fullmatch(self.objective) or abs(int(self.objective)) > MAX_PRIORITY:
            return None
        return int(self.objective)

    def fill(self, message: Any, objectives: Objectives, *, may_act_for_others: bool) -> None:
        """Sets those fields that the request message has and that are not set. Raises RoutingHeaderError."""
        values = {
            "tenant": self.tenant if may_act_for_others else "",
            "priority": self.priority(objectives),
            "ttft_slo_ms": self.ttft_slo_ms,
            "tpot_slo_ms": self.tpot_slo_ms,
            "session_id": self.session_id,
            "client_request_id": self.request_id,
        }
        for name, value in values.items():
            field = message.DESCRIPTOR.fields_by_name.get(name)
            if field is None or value is None or value == "":
                continue
            if not (message.HasField(name) if field.has_presence else getattr(message, name)):
                setattr(message, name, value)


NO_HEADERS = RoutingHeaders()


def read_objectives(text: str) -> Objectives:
    """Reads the operator's priorities of objectives from JSON. Raises ValueError with a text for the operator."""
    example = 'an object with a priority for each name, such as {"interactive": -10, "batch": 10}'
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error}); give {example}") from None
    if not isinstance(given, dict) or len(given) > MAX_OBJECTIVES:
        raise ValueError(f"must be {example}; at most {MAX_OBJECTIVES:,} names")
    for name, priority in given.items():
        is_number = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_number or abs(priority) > MAX_PRIORITY:
            raise ValueError(
                f"{name}: the priority must be a whole number from {-MAX_PRIORITY:,} to {MAX_PRIORITY:,}, where lower "
                f"runs first; it is {priority!r}"
            )
    return given


def _first(found: Mapping[str, str], names: Iterable[str]) -> tuple[str, str]:
    """Returns the first of these headers that was sent, and its value; empty ones if none was."""
    return next(((name, found[name]) for name in names if name in found), ("", ""))


def _milliseconds(name: str, value: str, most: int) -> int | None:
    if not value:
        return None
    if not _MILLISECONDS.fullmatch(value) or not 1 <= int(value) <= most:
        raise RoutingHeaderError(
            name, f"must be a whole number of milliseconds from 1 to {most:,}; it is {value[:32]!r}"
        )
    return int(value)


def _is_id(value: str) -> bool:
    return len(value) <= MAX_ID_BYTES and value.isascii() and value.isprintable()
