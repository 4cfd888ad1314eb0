"""The certificate of HTTPS, read again when its files change, so that its renewal needs no restart."""

import asyncio
import logging
import ssl
from pathlib import Path

_LOOK_S = 5.0

_log = logging.getLogger(__name__)


class Certificate:
    """A chain and its private key, as PEM, in an SSL context."""

    def __init__(self, context: ssl.SSLContext, chain: Path, key: Path) -> None:
        """``context`` has loaded the files already."""
        self._context = context
        self._chain = chain
        self._key = key
        self._seen = self._versions()
        self._last_look = self._seen

    async def watch(self, interval_s: float = _LOOK_S) -> None:
        """Checks the files periodically."""
        while True:
            await asyncio.sleep(interval_s)
            self.look()

    def look(self) -> None:
        """Uses changed files for new connections when two checks in a row have found the same: a partly written chain
        can be valid too. An unusable pair is logged once, and the last good one stays."""
        versions = self._versions()
        before, self._last_look = self._last_look, versions
        if versions == self._seen or versions != before:
            return
        self._seen = versions
        try:
            # First into an unused context: a key of another certificate would leave half of both.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._chain, self._key)
            self._context.load_cert_chain(self._chain, self._key)
        except (OSError, ssl.SSLError):
            _log.error(
                "%s and %s cannot be used together; the certificate from before stays in use", self._chain, self._key
            )
        else:
            _log.warning("%s was read again", self._chain)

    def _versions(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in (self._chain, self._key):
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return found
