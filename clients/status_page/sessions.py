"""The sessions of operators who logged in. Their keys stay in this process; a browser gets only a random id."""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_SESSIONS = 256
"""The limit of sessions. Above it, the one that has been unused for longest ends."""
IDLE_S = 3600.0
"""A session ends when it has been unused for this long. An open page uses it every second or, in the background, every
few seconds."""
MAX_LIFE_S = 12 * 3600.0
"""A session ends after this time in any case."""


def _new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass
class OperatorSession:
    """One operator, in one browser."""

    key: str | None
    """The operator's key; None if the service needs none."""
    csrf_token: str = field(default_factory=_new_token)
    """The token that shows that a change comes from the page: no other site can read it."""
    began: float = 0.0
    last_used: float = 0.0

    def is_token(self, token: str) -> bool:
        """Whether ``token`` is the session's. Takes the same time for every token."""
        return hmac.compare_digest(self.csrf_token.encode(), token.encode(errors="surrogateescape"))


class OperatorSessions:
    """The live sessions, by a hash of their ids: so the time of a look-up reveals nothing about the ids. For the event
    loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, OperatorSession] = OrderedDict()
        self.without_key = OperatorSession(None)
        """What all callers share if the service needs no key."""

    def open(self, key: str) -> str:
        """Begins a session. Returns its id."""
        session_id, now = _new_token(), self._clock()
        self._sessions[_digest(session_id)] = OperatorSession(key, began=now, last_used=now)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session_id

    def find(self, session_id: str) -> OperatorSession | None:
        """Returns the live session with this id, and counts it as used now."""
        digest, now = _digest(session_id), self._clock()
        session = self._sessions.get(digest)
        if session is None:
            return None
        if now - session.last_used >= IDLE_S or now - session.began >= MAX_LIFE_S:
            del self._sessions[digest]
            return None
        session.last_used = now
        self._sessions.move_to_end(digest)
        return session

    def close(self, session_id: str) -> None:
        """Ends a session, if it is live."""
        self._sessions.pop(_digest(session_id), None)


def _digest(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode(errors="surrogateescape")).digest()
