"""WatchKvEvents: the prefix cache's contents and changes, for routers that send a request to where its prefix is."""

from typing import Any

import grpc

import penstock.v1 as pb
from penstock.kv.events import KvChanges, KvEventLog, KvEventReader
from penstock.service.errors import Reason, ServiceError
from penstock.service.kv_publisher.watchers import KvWatchers
from penstock.service.transport.call_end import write


class KvEvents:
    """Serves all subscribers."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._watchers = KvWatchers(log)

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Sends events until the caller leaves or the service ends. The request has been validated."""
        # A router assumes that a worker has no events if nothing arrives at once.
        await context.send_initial_metadata(())
        reader = KvEventReader(self._log, request.stream_id, request.after_sequence)
        await self._watchers.follow(reader, lambda changes: write(context, message(self._log, changes)))
        raise ServiceError(Reason.SHUTDOWN, "the service is shutting down")

    def close(self) -> None:
        self._watchers.close()


def message(log: KvEventLog, changes: KvChanges) -> pb.WatchKvEventsResponse:
    """Builds the protobuf message for ``changes``."""
    return pb.WatchKvEventsResponse(
        sequence=changes.sequence,
        stream_id=log.stream_id,
        cleared=changes.cleared,
        removed_hashes=changes.removed,
        stored=[
            pb.KvBlock(
                hash=block.block_hash, parent_hash=block.parent_hash, token_ids=block.token_ids, adapter=block.adapter
            )
            for block in changes.stored
        ],
        block_size=log.block_size,
    )
