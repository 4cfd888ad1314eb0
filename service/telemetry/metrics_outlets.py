"""Where a service's metrics go: a page for Prometheus, a collector, both or nowhere."""

from collections.abc import Mapping

from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.service.config.addresses import Address
from penstock.service.telemetry.collector import LoopReader, MetricsReader
from penstock.service.telemetry.otlp import push_from
from penstock.service.telemetry.prometheus import MetricsPage


class MetricsOutlets:
    """For the event loop that it is made on, after the worker was started: threads begin here."""

    def __init__(
        self,
        reader: MetricsReader,
        address: Address | None,
        allowed_hosts: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> None:
        """``address``: the page's, None for no page; ``allowed_hosts``: further names that it is called by. ``environ``
        is read by OpenTelemetry's own names."""
        self._reader = reader
        from_threads = LoopReader(reader.read)
        self._page = (
            None if address is None else MetricsPage(address, AllowedHosts(address.host, allowed_hosts), from_threads)
        )
        self._push = push_from(environ, from_threads)

    def start(self) -> str | None:
        """From here on; returns where the page is, if there is one. Raises ListenError."""
        target = None if self._page is None else self._page.start()
        if self._push is not None:
            self._push.start()
        return target

    def stop(self) -> None:
        """Sends the last numbers, and ends both. Safe to call before ``start``, and twice."""
        if self._page is not None:
            self._page.stop()
        if self._push is not None:
            self._push.stop(self._reader.read())
