"""The service's load reports in response headers, for HTTP balancers that read ORCA."""

import base64
import json
from typing import Any

import grpc

from penstock.clients.gateway.upstream.recent import Recent
from penstock.v1.orca import SERVICE, TRAILER, OrcaLoadReport, OrcaLoadReportRequest

FORMAT_HEADER = "endpoint-load-metrics-format"
"""The request header that requests a report, as in vLLM: TEXT, JSON or BIN."""
_HEADER = "endpoint-load-metrics"
_KEPT_S = 0.2
"""How long a report is reused. Many responses share it."""
_TIMEOUT_S = 0.25
"""How long a response waits for it."""
_NUMBERS = ("application_utilization", "rps_fractional", "eps")


class LoadReports:
    """Gets the reports from the service's stream: grpcio's clients cannot read them from the trailers of other
    calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stream: Any = channel.unary_stream(
            f"/{SERVICE}/StreamCoreMetrics", OrcaLoadReportRequest.SerializeToString, OrcaLoadReport.FromString
        )
        self._recent = Recent(self._fetch, _KEPT_S)

    async def get(self) -> Any:
        """Returns an OrcaLoadReport that is at most ``_KEPT_S`` old; None if the service has none, or does not
        respond."""
        return await self._recent.get()

    async def _fetch(self) -> Any:
        call = self._stream(OrcaLoadReportRequest(), timeout=_TIMEOUT_S)
        try:
            report = await call.read()
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
        return None if report is grpc.aio.EOF else report


def load_header(report: Any, wanted: str) -> tuple[str, str] | None:
    """Returns the response header for a report in the format ``wanted``; None for an unknown format, which vLLM
    ignores too."""
    match wanted.strip().upper():
        case "TEXT":
            return _HEADER, "TEXT " + ", ".join(f"{name}={value}" for name, value in _flat(report).items())
        case "JSON":
            numbers = {name: getattr(report, name) for name in _NUMBERS}
            return _HEADER, "JSON " + json.dumps(numbers | {"named_metrics": dict(report.named_metrics)})
        case "BIN":
            return TRAILER, base64.b64encode(report.SerializeToString()).decode()
        case _:
            return None


def _flat(report: Any) -> dict[str, float]:
    named = {f"named_metrics.{name}": value for name, value in report.named_metrics.items()}
    return {name: getattr(report, name) for name in _NUMBERS} | named
