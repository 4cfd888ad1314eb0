"""SubscribeKvEvents: the prefix cache's contents, its changes and the engine's load, pushed to routers.

One task makes the batches while there are subscribers. Each subscriber reads at its own pace: sent batches that it has
not read are in gRPC's buffer for its stream, and all streams share the batches that are still to be sent.
"""

import asyncio
import logging
import time
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common

from penstock.kv.events import KvEventLog
from penstock.service.errors import Reason, ServiceError
from penstock.service.rpc.foreign.contracts import protocol_error
from penstock.service.rpc.vllm.kv_feed import KvFeed
from penstock.service.rpc.vllm.load import LoadReader, has_moved
from penstock.service.transport.call_end import write

_log = logging.getLogger(__name__)

BATCH_S = 0.01
"""The time between two batches, so that each has the changes of a step or more, and batches take at most a tenth of the
event loop's time."""
TICK_S = 0.1
"""How often the load is compared with the one that a subscriber was last sent."""
HEARTBEAT_S = 1.0
"""The longest time between two load messages."""


class KvEventStreams:
    """Serves all subscribers."""

    def __init__(self, log: KvEventLog, load: LoadReader) -> None:
        self._log = log
        self._feed = KvFeed(log)
        self._load = load
        self._num_watching = 0
        self._maker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Set, and replaced, when there are new batches."""
        self._is_closed = self._has_failed = False

    async def subscribe(
        self, request: common.SubscribeKvEventsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Sends batches until the caller disconnects or the service shuts down. Raises StatusError if the number to
        resume from is unknown, or the subscriber falls too far behind."""
        # A router assumes that a worker has no events if nothing arrives at once.
        await context.send_initial_metadata(())
        self._num_watching += 1
        if self._maker is None:
            self._maker = asyncio.create_task(self._make_batches(), name="penstock KV batches")
        try:
            await _Subscriber(self, self._feed, self._load, context).run(request.start_sequence_number)
        finally:
            self._num_watching -= 1
            if not self._num_watching:
                self._maker.cancel()
                self._maker = None
        if self._has_failed:
            raise ServiceError(Reason.INTERNAL, "an internal error ended KV events: see the service's log")
        raise ServiceError(Reason.SHUTDOWN, "the service is shutting down")

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._notify()

    async def wait(self, timeout_s: float) -> None:
        """Waits for new batches, at most for the given time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _make_batches(self) -> None:
        woken = asyncio.Event()
        try:
            while True:
                while not self._feed.is_up_to_date:
                    self._feed.advance()
                    self._notify()
                    await asyncio.sleep(BATCH_S)
                self._notify()  # a snapshot can begin
                woken.clear()
                self._log.wake_once(woken.set)
                await woken.wait()
        except Exception:
            _log.exception("KV events are no longer sent")
            self._has_failed = True
            self.close()
        finally:
            self._log.forget_wake(woken.set)


class _Subscriber:
    """The state of one stream."""

    def __init__(
        self, events: KvEventStreams, feed: KvFeed, load: LoadReader, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        self._events = events
        self._feed = feed
        self._load = load
        self._context = context
        self._sequence = 0
        """The number of the last batch that was sent."""
        self._sample = 0
        self._sent = common.EngineLoad()
        """The last load that was sent, and when."""
        self._sent_at = 0.0

    async def run(self, start: int) -> None:
        """Returns when the service shuts down."""
        if start:
            if not self._feed.can_resume(start):
                raise protocol_error(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"start_sequence_number: {start} is not a number after which this service has every change; "
                    "clear the worker's blocks, and subscribe from 0",
                )
            self._sequence = start
        else:
            await self._send_snapshot()
        while not self._events.is_closed:
            batches = self._feed.after(self._sequence)
            if batches is None:
                raise protocol_error(
                    grpc.StatusCode.DATA_LOSS,
                    "the subscriber read too slowly; clear the worker's blocks, and subscribe from 0",
                )
            for batch in batches:
                self._sequence += 1
                await self._send(batch)
            if not batches:
                await self._send_load()
                await self._events.wait(TICK_S)

    async def _send_snapshot(self) -> None:
        while not self._feed.is_up_to_date:
            await self._events.wait(TICK_S)
            if self._events.is_closed:
                return
        chunks, sequence = self._feed.snapshot(), self._feed.sequence
        for chunk in chunks:
            await self._send(chunk)
        self._sequence = sequence

    async def _send(self, batch: bytes) -> None:
        """Sends a serialized batch with the current load: readers merge concatenated messages."""
        load = self._numbered(load_only=False)
        await write(self._context, batch + common.KvEventBatch(load=load).SerializeToString())

    async def _send_load(self) -> None:
        """Sends only the load, if it has changed or was sent too long ago."""
        if not has_moved(self._sent, self._load.core()) and time.monotonic() < self._sent_at + HEARTBEAT_S:
            return
        load = self._numbered(load_only=True)
        batch = common.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), load=load)
        await write(self._context, batch.SerializeToString())

    def _numbered(self, *, load_only: bool) -> common.EngineLoad:
        self._sent, self._sent_at = self._load.core(), time.monotonic()
        self._sample += 1
        load = common.EngineLoad()
        load.CopyFrom(self._sent)
        load.sample, load.load_only = self._sample, load_only
        if load_only or self._sample == 1:
            self._load.add_telemetry(load)
        return load
