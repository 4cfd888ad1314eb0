"""Publishes a service's metrics: on a page for Prometheus, to a collector, both or neither."""

from collections.abc import Mapping

from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.service.config.addresses import Address
from penstock.service.telemetry.collector import LoopReader, MetricsReader
from penstock.service.telemetry.otlp import push_from
from penstock.service.telemetry.prometheus import MetricsPage


class MetricsOutlets:
    """The page and the push. Create it on the event loop, after the worker has started, because it starts threads."""

    def __init__(
        self,
        reader: MetricsReader,
        address: Address | None,
        allowed_hosts: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> None:
        """``address``: of the page, None for no page. ``allowed_hosts``: further host names of the page. ``environ``:
        the environment with OpenTelemetry's own variables."""
        self._reader = reader
        from_threads = LoopReader(reader.read)
        self._page = (
            None if address is None else MetricsPage(address, AllowedHosts(address.host, allowed_hosts), from_threads)
        )
        self._push = push_from(environ, from_threads)

    def start(self) -> str | None:
        """Starts both; returns the address of the page, if there is one. Raises ListenError."""
        target = None if self._page is None else self._page.start()
        if self._push is not None:
            self._push.start()
        return target

    def stop(self) -> None:
        """Sends the last values, and stops both. Safe to call before ``start``, and twice."""
        if self._page is not None:
            self._page.stop()
        if self._push is not None:
            self._push.stop(self._reader.read())
