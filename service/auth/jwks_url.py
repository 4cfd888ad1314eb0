"""The keys of an identity provider, fetched from its JWKS endpoint. They are fetched again every few minutes, and when
a token names an unknown key. The last keys that could be used stay in use.

A custom authority can be set with SSL_CERT_FILE, and a proxy with HTTPS_PROXY, as for other programs.
"""

import http.client
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any

from penstock.clients.host.reloaded_files import FileError
from penstock.service.auth.identity import Principal
from penstock.service.auth.jwt import TokenKeys, TokenRules
from penstock.service.errors import ServiceError

_log = logging.getLogger(__name__)

JWKS_URL_FLAG = "--jwt-jwks-url"
FETCH_INTERVAL_S = 300.0
"""The time between two fetches."""
RETRY_INTERVAL_S = 30.0
"""The time from a failed fetch to the next one."""
MIN_INTERVAL_S = 10.0
"""The least time between two fetches, however many tokens name unknown keys."""
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20
"""The maximum size of a JWKS."""
_CHUNK_BYTES = 1 << 16


class JwksUrl:
    """Credentials whose keys come from a URL. The file watch calls ``refresh`` in a thread; everything else runs on the
    event loop."""

    def __init__(self, url: str, rules: TokenRules, clock: Callable[[], float] = time.monotonic) -> None:
        """Fetches the keys. Raises FileError."""
        self._url = url
        self._rules = rules
        self._clock = clock
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=ssl.create_default_context()), _NoRedirects
        )
        self._download: Future[bytes] | None = None
        """The last one, which may still run."""
        self._problem = ""
        self._content = self._fetch()
        self._keys = TokenKeys.parse(str(self), self._content, rules)
        self._fetched_at = clock()
        self._fetch_at = self._fetched_at + FETCH_INTERVAL_S

    def __str__(self) -> str:
        """Returns the start of error messages."""
        return f"{JWKS_URL_FLAG} {self._url}"

    def principal_of(self, credential: str) -> Principal | None:
        """See ``Credentials``."""
        try:
            return self._keys.principal_of(credential)
        except ServiceError:
            if self._keys.lacks_key_of(credential):
                # The provider may have added a key. The client's next call finds it.
                self._fetch_at = min(self._fetch_at, self._fetched_at + MIN_INTERVAL_S)
            raise

    def refresh(self) -> Callable[[], None] | None:
        """See ``Watched``. Fetches the keys if that is due."""
        if self._clock() < self._fetch_at:
            return None
        try:
            content = self._fetch()
            keys = TokenKeys.parse(str(self), content, self._rules) if content != self._content else self._keys
        except FileError as error:
            if str(error) != self._problem:
                _log.error("%s; the previous keys stay in use", error)
            self._problem = str(error)
            self._plan_fetch(RETRY_INTERVAL_S)
            return None
        if self._problem:
            _log.info("%s: can be used again", self)
        self._problem = ""
        self._plan_fetch(FETCH_INTERVAL_S)
        return None if keys is self._keys else lambda: self._take(content, keys)

    def _plan_fetch(self, interval_s: float) -> None:
        self._fetched_at = self._clock()
        self._fetch_at = self._fetched_at + interval_s

    def _take(self, content: bytes, keys: TokenKeys) -> None:
        self._content, self._keys = content, keys
        _log.info("%s: changed, and in use from now on", self)

    def _fetch(self) -> bytes:
        """Returns the response after ``FETCH_TIMEOUT_S`` at most. Raises FileError.

        The download has its own thread, which nothing waits for any longer: neither the resolver nor a server that
        sends a header byte by byte can delay the checks of other files, or the end of the process.
        """
        if self._download is None or self._download.done():
            self._download = Future()
            threading.Thread(target=self._run_download, args=(self._download,), name="jwks", daemon=True).start()
        try:
            return self._download.result(FETCH_TIMEOUT_S)
        except TimeoutError:
            raise FileError(f"{self}: took longer than {FETCH_TIMEOUT_S:g} s; check the network") from None

    def _run_download(self, download: "Future[bytes]") -> None:
        try:
            download.set_result(self._read())
        except Exception as error:
            download.set_exception(error)

    def _read(self) -> bytes:
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        headers = {"Accept": "application/json", "User-Agent": "penstock"}
        request = urllib.request.Request(self._url, headers=headers)  # noqa: S310 - the flag must begin with https
        parts: list[bytes] = []
        num_bytes = 0
        try:
            with self._opener.open(request, timeout=FETCH_TIMEOUT_S) as response:
                while part := response.read1(_CHUNK_BYTES):
                    parts.append(part)
                    num_bytes += len(part)
                    if num_bytes > MAX_BYTES:
                        raise FileError(f"{self}: is longer than {MAX_BYTES:,} bytes; is it the right URL?")
                    if time.monotonic() > deadline:
                        raise TimeoutError("the server sends too slowly")
        except urllib.error.HTTPError as error:
            error.close()
            raise FileError(f"{self}: returned status {error.code}; it must be 200, without a redirect") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise FileError(f"{self}: cannot be fetched ({' '.join(str(reason).split())}); check the URL") from None
        return b"".join(parts)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the keys must come from the host that the operator has named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        return None
