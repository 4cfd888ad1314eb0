"""Publishes a service's metrics: on a page for Prometheus, to a collector, both or neither."""

import os
from collections.abc import Callable

from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.service.config.addresses import Address
from penstock.service.telemetry.collector import Reading, from_threads, read_starting
from penstock.service.telemetry.otlp import MetricsPush, push_from
from penstock.service.telemetry.prometheus import MetricsPage, Readiness


class MetricsOutlets:
    """The page and the push. Create it on the event loop, and stop it once."""

    def __init__(
        self, readiness: Callable[[], Readiness], address: Address | None, allowed_hosts: tuple[str, ...]
    ) -> None:
        """Opens the page at ``address``; None: no page. ``allowed_hosts``: further host names of the page. Raises
        ListenError."""
        self._read = read_starting
        self._read_from_thread = from_threads(self._read_now)
        self._page: MetricsPage | None = None
        self.page_target: str | None = None
        """The address of the page, with the port that was bound."""
        if address is not None:
            hosts = AllowedHosts(address.host, allowed_hosts)
            self._page = MetricsPage(address, hosts, self._read_from_thread, from_threads(readiness))
            self.page_target = self._page.target
        self._push: MetricsPush | None = None

    def _read_now(self) -> list[Reading]:
        return self._read()  # ``publish`` replaces it

    def publish(self, read: Callable[[], list[Reading]]) -> None:
        """Publishes what ``read`` returns from now on, and starts the push if OpenTelemetry's environment variables
        name a collector. Call it after the worker has started, because it opens a gRPC channel."""
        self._read = read
        self._push = push_from(os.environ, self._read_from_thread)
        if self._push is not None:
            self._push.start()

    def stop(self) -> None:
        """Sends the last values, and stops both."""
        if self._page is not None:
            self._page.stop()
        if self._push is not None:
            self._push.stop(self._read())
