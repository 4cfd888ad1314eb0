"""Limits the memory of calls before they are checked and after they are handled: messages in flight, unread responses,
connections. The limit on metadata is in early_refusals.py."""

from penstock.clients.host.parse_turns import ParseTurns
from penstock.service.transport.connections import Connections
from penstock.service.transport.places import Places, Rules
from penstock.service.transport.unfinished import UnfinishedMessages
from penstock.service.transport.unread import UnreadAnswers

MAX_MESSAGE_BYTES = 8 << 20
"""Limit on a request message: a prompt of 4 MiB, and as many bytes of token ids. gRPC keeps the received part of an
incomplete message, so each message that the limits below allow may hold 8 MiB."""
MAX_OPEN_MESSAGE_BYTES = 4096
"""Limit on a message to a method that is open to everyone, so that clients without a key use little memory."""

OPEN_MESSAGES, OPEN_MESSAGES_OF_HOST = 16, 8
"""Limits on messages in flight to methods that are open to everyone: in total, and from one host."""
OPEN_HOLD_S = 0.01
"""How long one of them may make others wait. Most messages have arrived before they are read, so slow clients cannot
block probes."""
OPEN_PATIENCE_S = 60.0
"""How long such a method waits for a message while no other call waits. Tools keep a reflection stream open between
requests."""
MESSAGES, MESSAGES_OF_TENANT = 32, 16
"""Limits on callers' messages in flight, in total and per tenant, excluding later messages of streams."""
SPARE_MESSAGES = 32
"""Places beyond that limit for tenants that have none."""
HOLD_S, PATIENCE_S = 5.0, 60.0
"""The same two times for callers' messages. 8 MiB per minute is 140 KB/s."""
OPEN_CALLS, OPEN_CALLS_OF_HOST = 1024, 512
"""Limits on long-lived calls of methods that are open to everyone, such as ``Health.Watch`` and reflection."""
_WAITING_OF_HOST, _MAX_WAITING_OPEN = 64, 256
_WAITING_OF_TENANT, _MAX_WAITING = 2048, 4096
"""Limits on calls that wait for one of these places: per owner, and in total. gRPC buffers 64 KiB of each."""


class CallLimits:
    """The limits of one listener. Belongs to the event loop."""

    def __init__(self, connections: Connections | None = None) -> None:
        """``connections``: shared by the whole service; None creates new ones."""
        self.open_messages = Places(
            Rules(
                total=OPEN_MESSAGES,
                each=OPEN_MESSAGES_OF_HOST,
                waiting_each=_WAITING_OF_HOST,
                max_waiting=_MAX_WAITING_OPEN,
                hold_s=OPEN_HOLD_S,
                patience_s=OPEN_PATIENCE_S,
            )
        )
        """The owner of a place is a host."""
        self.messages = Places(
            Rules(
                total=MESSAGES,
                each=MESSAGES_OF_TENANT,
                waiting_each=_WAITING_OF_TENANT,
                max_waiting=_MAX_WAITING,
                hold_s=HOLD_S,
                patience_s=PATIENCE_S,
                spare=SPARE_MESSAGES,
            )
        )
        """The owner of a place is a tenant."""
        self.open_calls = Places(
            Rules(
                total=OPEN_CALLS,
                each=OPEN_CALLS_OF_HOST,
                waiting_each=_WAITING_OF_HOST,
                max_waiting=_MAX_WAITING_OPEN,
                hold_s=OPEN_HOLD_S,
                message="too many calls without a key were open, and this one was open the longest; call again",
            )
        )
        """The owner of a place is a host."""
        self.parse_turns = ParseTurns()
        self.answers = UnreadAnswers()
        self.connections = connections or Connections()
        self.unfinished = UnfinishedMessages(self.connections)

    def messages_of(self, is_open: bool) -> Places:
        """Returns the places for messages: of methods that are open to everyone, or of callers."""
        return self.open_messages if is_open else self.messages

    def start(self) -> None:
        self.connections.start()
        self.unfinished.start()

    def stop(self) -> None:
        self.connections.stop()
        self.unfinished.stop()
