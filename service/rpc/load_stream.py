"""xds.service.orca.v3.OpenRcaService: load reports outside of calls (gRFC A51), for balancers with long or infrequent
calls.

It needs no credentials: neither Envoy nor gRPC's balancers send any, and the trailers of refused calls have the same
reports."""

import asyncio
from typing import Any

import grpc

from penstock.service.config.durations import is_valid, to_seconds
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.rpc.load_report import LoadReporter
from penstock.service.transport.call_end import write
from penstock.service.transport.connections import peer_of
from penstock.service.transport.places import Places, Rules
from penstock.v1.orca import SERVICE, OrcaLoadReport, OrcaLoadReportRequest

MIN_INTERVAL_S = 1.0
"""The shortest interval, and the default, as defined by A51. A shorter one is raised to this."""
MAX_INTERVAL_S = 86_400.0
"""The longest interval. A longer one is reduced to this."""
MAX_STREAMS, MAX_STREAMS_OF_HOST = 512, 64
"""Limits on open streams. Together they take a few percent of a core."""


class LoadStreams:
    """Serves all subscribers."""

    def __init__(self, reporter: LoadReporter) -> None:
        self._reporter = reporter
        self._closed = asyncio.Event()
        self._places = Places(
            Rules(
                total=MAX_STREAMS,
                each=MAX_STREAMS_OF_HOST,
                waiting_each=0,
                max_waiting=0,
                hold_s=0.0,
                message="too many streams of load reports are open; close some, or read the trailers of other calls",
            )
        )

    async def StreamCoreMetrics(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Sends a report at once and after every interval, until the caller disconnects or the service shuts down."""
        interval_s = _interval_s(request)
        host, _ = peer_of(context.peer()) or ("", 0)
        async with self._places.place(host):
            await context.send_initial_metadata(())
            while True:
                await write(context, self._reporter.report())
                try:
                    async with asyncio.timeout(interval_s):
                        await self._closed.wait()
                except TimeoutError:
                    continue
                raise ServiceError(Reason.SHUTDOWN, "the service is shutting down")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        handlers = {
            "StreamCoreMetrics": grpc.unary_stream_rpc_method_handler(
                self.StreamCoreMetrics, OrcaLoadReportRequest.FromString, OrcaLoadReport.SerializeToString
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)

    def close(self) -> None:
        """Ends all streams, because the service shuts down."""
        self._closed.set()


def _interval_s(request: Any) -> float:
    interval = request.report_interval
    if not is_valid(interval) or to_seconds(interval) < 0:
        raise invalid("report_interval", "must be a duration of at least 0")
    return min(max(to_seconds(interval), MIN_INTERVAL_S), MAX_INTERVAL_S)
