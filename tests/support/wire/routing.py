"""What gateways say about a request in headers or metadata, and whether it has reached the scheduler."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from penstock.scheduler.request import Request

KEY, PLAIN = "k" * 40, "p" * 40
"""The keys of a caller that may act for others, and of one that may not."""
ADMITTED: dict[str, tuple[str, Callable[[Request], bool]]] = {
    "x-llm-d-inference-fairness-id": ("acme", lambda request: request.tenant == "acme"),
    "x-gateway-inference-fairness-id": ("acme", lambda request: request.tenant == "acme"),
    "x-llm-d-inference-objective": ("batch", lambda request: request.priority == 10),
    "x-gateway-inference-objective": ("-4", lambda request: request.priority == -4),
    "x-llm-d-slo-ttft-ms": ("9000", lambda request: request.first_token_target == request.arrival + 9),
    "x-slo-ttft-ms": ("9000", lambda request: request.first_token_target == request.arrival + 9),
    "x-llm-d-slo-tpot-ms": ("40", lambda request: request.target_itl_s == 0.04),
    "x-slo-tpot-ms": ("40", lambda request: request.target_itl_s == 0.04),
    "x-session-id": ("talk", lambda request: request.session_id == "talk" and request.retain_s > 0),
    "x-request-id": ("mine", lambda request: request.client_request_id == "mine"),
}


def write_keys(folder: Path) -> Path:
    """Writes a file with both keys."""
    lines = [f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} gateway act-for-others"]
    lines.append(f"sha256:{hashlib.sha256(PLAIN.encode()).hexdigest()} plain")
    (folder / "keys").write_text("\n".join(lines))
    return folder / "keys"
