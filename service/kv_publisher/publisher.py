"""Reads the changes of the prefix cache on the event loop, and hands them to the publisher's thread.

The loop only encodes, for at most a tenth of its time, and never waits for a subscriber.
"""

import asyncio
import contextlib
import logging
import time
from ipaddress import ip_address

from penstock.kv.events import KvEventLog, KvEventReader
from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.kv_publisher.batches import BatchEncoder
from penstock.service.kv_publisher.history import BatchHistory
from penstock.service.kv_publisher.sockets import PublisherSockets, listens

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 32 << 10
"""A batch of this size takes a millisecond of the event loop's time."""
PAUSE_S = 0.01
"""The pause after a batch, so that more changes share one batch."""


class KvEventPublisher:
    """Publishes the whole content of a log and then its changes, until ``close``."""

    def __init__(self, config: KvEventsConfig, log: KvEventLog) -> None:
        """Raises ListenError. Blocks that are already in the log have no tenant."""
        log.keeps_details = True
        self.config = config
        self._log = log
        num_kept = 0 if config.replay_endpoint is None else config.buffer_steps
        self.history = BatchHistory(num_kept, config.max_queue_size)
        self._sockets = PublisherSockets(config, self.history)
        self.endpoint, self.replay_endpoint = self._sockets.endpoint, self._sockets.replay_endpoint
        self.listens = listens(config.endpoint)
        """Whether subscribers connect to ``endpoint``; otherwise this service connects to a subscriber there."""
        for endpoint in (self.endpoint if self.listens else None, self.replay_endpoint):
            if endpoint is not None and not _is_local(endpoint):
                _log.warning(
                    "--kv-events-config: anyone who can reach %s can read the tokens of all prompts and outputs; keep "
                    "others out with a firewall or a network policy",
                    endpoint,
                )
        verb, replays = "listens on" if self.listens else "connects to", self.replay_endpoint or "none"
        _log.info("KV events: the service %s %s; replays: %s", verb, self.endpoint, replays)
        self._task = asyncio.create_task(self._run(), name="penstock KV events")

    async def close(self) -> None:
        """Publishes the waiting batches, and ends."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await asyncio.to_thread(self._sockets.close)

    async def _run(self) -> None:
        reader, encoder, changed = KvEventReader(self._log), BatchEncoder(self._log), asyncio.Event()
        try:
            while True:
                payload = encoder.encode_batch(reader.read(MAX_BATCH_BYTES), time.time())
                if payload is not None:
                    self.history.add_batch(payload)
                    self._sockets.wake()
                if reader.is_up_to_date:
                    changed.clear()
                    self._log.wake_once(changed.set)
                    await changed.wait()
                await asyncio.sleep(PAUSE_S)
        except Exception:
            _log.exception("KV events are no longer published")
        finally:
            self._log.forget_wake(changed.set)


def _is_local(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"
