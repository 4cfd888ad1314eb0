"""Limits what calls hold in the service before they are checked and after they are answered: messages in flight, unread
answers, connections. The bound on metadata is in early_refusals.py."""

from penstock.service.connections import Connections
from penstock.service.errors import Reason, ServiceError
from penstock.service.places import Places, Rules
from penstock.service.unread import UnreadAnswers

MAX_MESSAGE_BYTES = 8 << 20
"""Limit on a request message: a prompt of 4 MiB, and as many bytes of token ids again. gRPC keeps what has arrived of a
message until the rest is there, so each message that the numbers below allow may hold 8 MiB."""
MAX_OPEN_MESSAGE_BYTES = 4096
"""Limit on a message to a method that is open to everyone, so that clients without a key leave little here."""

OPEN_MESSAGES, OPEN_MESSAGES_OF_HOST = 16, 8
"""Limits on messages in flight to methods that are open to everyone: in all, and from one host."""
OPEN_HOLD_S = 0.01
"""How long one of them keeps others waiting. Most have arrived before they are read, so slow clients cannot keep probes
out."""
OPEN_PATIENCE_S = 15.0
"""How long such a method waits for a message to arrive."""
MESSAGES, MESSAGES_OF_TENANT = 32, 16
"""Limits on callers' messages in flight, in all and from one tenant, except for the later ones of a stream."""
HOLD_S, PATIENCE_S = 5.0, 60.0
"""The same times for callers' messages. 8 MiB in a minute are 140 KB/s."""
OPEN_CALLS, OPEN_CALLS_OF_HOST = 1024, 512
"""Limits on calls of methods that are open to everyone, some of which last: ``Health.Watch``, reflection."""
_MAX_WAITING_OPEN, _MAX_WAITING = 64, 1024
"""Limits on calls that wait for one of these places. gRPC keeps 64 KiB of their messages."""


class CallLimits:
    """The limits of one service, for all its listeners. What they count belongs to the event loop."""

    def __init__(self) -> None:
        self.open_messages = _messages(
            OPEN_MESSAGES, OPEN_MESSAGES_OF_HOST, _MAX_WAITING_OPEN, OPEN_HOLD_S, OPEN_PATIENCE_S
        )
        """The owner of a place is a host."""
        self.messages = _messages(MESSAGES, MESSAGES_OF_TENANT, _MAX_WAITING, HOLD_S, PATIENCE_S)
        """The owner of a place is a tenant."""
        self.open_calls = Places(
            Rules(OPEN_CALLS, OPEN_CALLS_OF_HOST, _MAX_WAITING_OPEN, OPEN_HOLD_S, None, _too_many_calls)
        )
        """The owner of a place is a host."""
        self.answers = UnreadAnswers()
        self.connections = Connections()


def _messages(total: int, each: int, max_waiting: int, hold_s: float, patience_s: float) -> Places:
    def late() -> ServiceError:
        return ServiceError(
            Reason.DEADLINE, f"the message did not arrive within {patience_s:g} s; call again when it is ready"
        )

    return Places(Rules(total, each, max_waiting, hold_s, patience_s, _too_many_messages, late))


def _too_many_messages() -> ServiceError:
    return ServiceError(Reason.MESSAGES_IN_FLIGHT)


def _too_many_calls() -> ServiceError:
    message = "too many calls without a key were open, and this one was open the longest; call again"
    return ServiceError(Reason.MESSAGES_IN_FLIGHT, message)
