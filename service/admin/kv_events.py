"""WatchKvEvents: the prefix cache's contents and all changes, for routers that send a request to where its prefix is.

A subscriber receives events as fast as it reads them, within a limit on the event loop's time. Its pending events take
only their hashes. A subscriber that falls too far behind receives the whole contents again.
"""

import asyncio
from typing import Any

import grpc

import penstock.v1 as pb
from penstock.kv.events import KvChanges, KvEventLog, KvEventReader
from penstock.service.errors import Reason, ServiceError
from penstock.service.transport.call_end import write

MAX_MESSAGE_BYTES = 32 << 10
"""Takes a millisecond of the event loop's time."""
PAUSE_S = 0.01
"""The pause after a message, times the number of subscribers. So all subscribers together receive at most 100 messages
per second, which take a tenth of a core if the messages are full."""


class KvEvents:
    """Serves all subscribers."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._watching: set[asyncio.Event] = set()
        """The event that each subscriber waits for."""
        self._is_closed = False

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Sends events until the caller leaves or the service ends. The request has been validated."""
        # A router assumes that a worker has no events if nothing arrives at once.
        await context.send_initial_metadata(())
        reader = KvEventReader(self._log, request.stream_id, request.after_sequence)
        changed = asyncio.Event()
        self._watching.add(changed)
        try:
            while not self._is_closed:
                await write(context, message(self._log, reader.read(MAX_MESSAGE_BYTES)))
                changed.clear()
                if reader.is_up_to_date and not self._is_closed:
                    self._log.wake_once(changed.set)
                    await changed.wait()
                await asyncio.sleep(len(self._watching) * PAUSE_S)
        finally:
            self._watching.discard(changed)
            self._log.forget_wake(changed.set)
        raise ServiceError(Reason.SHUTDOWN, "the service is shutting down")

    def close(self) -> None:
        self._is_closed = True
        for changed in self._watching:
            changed.set()


def message(log: KvEventLog, changes: KvChanges) -> pb.WatchKvEventsResponse:
    """Builds the protobuf message for ``changes``."""
    return pb.WatchKvEventsResponse(
        sequence=changes.sequence,
        stream_id=log.stream_id,
        cleared=changes.cleared,
        removed_hashes=changes.removed,
        stored=[
            pb.KvBlock(hash=block.block_hash, parent_hash=block.parent_hash, token_ids=block.token_ids)
            for block in changes.stored
        ],
        block_size=log.block_size,
    )
