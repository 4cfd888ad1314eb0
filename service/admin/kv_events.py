"""WatchKvEvents: what the prefix cache has, and every change, for routers that send a request where its prefix is.

A subscriber is told as fast as it reads, and no faster than the loop can spare: what it has not been told yet is only
a list of hashes, and one that falls too far behind is told everything anew.
"""

import asyncio
from typing import Any

import grpc

from penstock.kv.events import KvChanges, KvEventLog, KvEventReader
from penstock.service.errors import Reason, ServiceError
from penstock.service.transport.call_end import write
from penstock.v1 import admin_pb2 as pb

MAX_MESSAGE_BYTES = 32 << 10
"""A millisecond of the loop's time."""
PAUSE_S = 0.01
"""Between two messages, and for each subscriber: so all of them together are told a hundred messages a second at most,
which is a tenth of a core when the messages are full."""


class KvEvents:
    """One for all who watch."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._watching: set[asyncio.Event] = set()
        """What each of them waits for."""
        self._is_closed = False

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Until the caller leaves or the service ends. The request is within its bounds."""
        # Routers take a worker that says nothing at once for one without events.
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
        raise ServiceError(Reason.SHUTDOWN, "the service is going down")

    def close(self) -> None:
        """Ends what watches: the service goes down."""
        self._is_closed = True
        for changed in self._watching:
            changed.set()


def message(log: KvEventLog, changes: KvChanges) -> pb.WatchKvEventsResponse:
    """As it is sent."""
    return pb.WatchKvEventsResponse(
        sequence=changes.sequence,
        stream_id=log.stream_id,
        cleared=changes.cleared,
        removed_hashes=changes.removed,
        stored=[
            pb.KvBlock(hash=block_hash, parent_hash=parent_hash, token_ids=token_ids)
            for block_hash, parent_hash, token_ids in changes.stored
        ],
        block_size=log.block_size,
    )
