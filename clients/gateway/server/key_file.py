"""The file with the gateway's own key, read again when it changes, so that a new key needs no restart."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from penstock.clients.errors import PenstockError

_LOOK_S = 5.0
_MAX_BYTES = 4096
_FLAG = "--api-key-file"

_log = logging.getLogger(__name__)


def read_key(path: Path) -> str:
    """Reads the key in a file. Raises PenstockError, whose text does not contain the key."""
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise PenstockError(f"{_FLAG}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PenstockError(f"{_FLAG}: {path} is not a text file; is it the key's file?") from None
    if not (key and key.isascii() and key.isprintable() and len(key) <= _MAX_BYTES):
        raise PenstockError(f"{_FLAG}: {path} must hold one line of printable ASCII, at most {_MAX_BYTES:,} bytes")
    return key


class KeyFile:
    """A file that held ``key`` when it was last read."""

    def __init__(self, path: Path, key: str | None, on_change: Callable[[str], None]) -> None:
        self._path = path
        self._key = key
        self._last_read = key
        self._on_change = on_change
        self._problem = ""

    async def watch(self, interval_s: float = _LOOK_S) -> None:
        """Checks the file periodically."""
        while True:
            await asyncio.sleep(interval_s)
            self.look()

    def look(self) -> None:
        """Passes on a new key when two checks in a row have read it: a partly written key looks valid too. An invalid
        key is logged once, and the last good one stays."""
        try:
            key = read_key(self._path)
        except PenstockError as error:
            if str(error) != self._problem:
                _log.error("%s; the key from before stays in use", error)
            self._problem, self._last_read = str(error), None
            return
        self._problem = ""
        before, self._last_read = self._last_read, key
        if key != self._key and key == before:
            self._key = key
            self._on_change(key)
            _log.warning("%s was read again", self._path)
