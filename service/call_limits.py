"""What calls may hold in the service before anything of theirs is checked, and after they are answered: metadata,
messages on their way, answers on their way, connections."""

import asyncio

import grpc

from penstock.service.connections import Connections
from penstock.service.errors import Reason, ServiceError
from penstock.service.identity import Metadata
from penstock.service.places import Places, Rules
from penstock.service.unread import UnreadAnswers

MAX_MESSAGE_BYTES = 8 << 20
"""Of a request: a prompt of 4 MiB, and token ids of as many bytes again."""
MAX_OPEN_MESSAGE_BYTES = 4096
"""Of a request of a method that is open to everyone: whoever has no key can leave little here."""
MAX_METADATA_BYTES = 16 << 10
"""Counted as HTTP/2 does, with 32 bytes for each header."""
_HEADER_BYTES = 32
CUT_METADATA_BYTES = 4 * MAX_METADATA_BYTES
"""A client that sends more is cut off: it ignores what it was told, and others wait while such a head is read."""
OPEN_PATIENCE_S = 15.0
"""How long a method that is open to everyone waits for a message: gRPC keeps what has come of one, megabytes even, until
the rest does."""
PATIENCE_S = 60.0
"""The same for callers: a message of 8 MiB may come at 140 KB/s."""


def _too_many() -> ServiceError:
    return ServiceError(Reason.MESSAGES_IN_FLIGHT)


def _too_late(patience_s: float) -> ServiceError:
    return ServiceError(Reason.DEADLINE, f"no message came within {patience_s:g} s; call again when there is one")


class CallLimits:
    """The limits of one service, for all its listeners. What they count belongs to the event loop."""

    def __init__(self) -> None:
        # While others wait, whose messages have mostly come already, a place is free again after a hundredth of a
        # second: 16 stubborn clients cannot keep a probe out, and a thousand cannot for long.
        self.open_messages = Places(
            Rules(16, 8, max_waiting=64, hold_s=0.01, patience_s=OPEN_PATIENCE_S, displaced=_too_many,
                  late=lambda: _too_late(OPEN_PATIENCE_S))
        )  # fmt: skip
        """Messages that clients without a key may have on their way, of up to 8 MiB each, by host."""
        self.messages = Places(
            Rules(32, 16, max_waiting=1024, hold_s=5.0, patience_s=PATIENCE_S, displaced=_too_many,
                  late=lambda: _too_late(PATIENCE_S))
        )  # fmt: skip
        """The same for callers, by tenant: 256 MiB at most."""
        self.open_calls = Places(
            Rules(1024, 512, max_waiting=64, hold_s=0.01, patience_s=None, displaced=lambda: ServiceError(
                Reason.MESSAGES_IN_FLIGHT, "too many calls without a key; try again later"), late=_too_many)
        )  # fmt: skip
        """Calls that need no key, ``Health.Watch`` above all, by host."""
        self.answers = UnreadAnswers()
        self.connections = Connections()


def metadata_bytes(metadata: Metadata) -> int:
    """As HTTP/2 counts them."""
    return sum([len(name) + len(value) + _HEADER_BYTES for name, value in metadata])
