"""httptools' request parser, without protocol upgrades."""

from typing import Protocol

import httptools

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RequestHandler(Protocol):
    """Receives the parts of requests, in order."""

    def on_message_begin(self) -> None:
        """Receives the first byte of a head."""

    def on_url(self, url: bytes) -> None:
        """Receives a part of the request's target."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receives a header or a trailer."""

    def on_headers_complete(self) -> None:
        """Receives the end of a head."""

    def on_body(self, body: bytes) -> None:
        """Receives a part of a body."""

    def on_message_complete(self) -> None:
        """Receives the end of a request."""


class RequestParser:
    """Serves a request that offers an upgrade as an ordinary one, body included, as RFC 9110 (7.8) requires.

    httptools skips the body of such a request and then parses it as the next request. So after the head a second
    parser, which sees only the headers that delimit the body, reads on from where the first one stopped. Has those
    methods of ``httptools.HttpRequestParser`` that uvicorn calls.
    """

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._is_replaying = False
        """Whether the second parser reads the headers that it is given, which the handler has seen already."""
        self._framing: list[tuple[bytes, bytes]] = []
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parses the next bytes. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._replace_parser()
            else:
                return

    def get_method(self) -> bytes:
        """Returns the method of the request whose head has ended."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Returns the version of that request, such as 1.1."""
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        """Returns whether the connection may serve another request afterwards."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Returns False: no request upgrades."""
        return False

    def on_message_begin(self) -> None:
        """Forwards the event."""
        if not self._is_replaying:
            self._framing = []
            self._handler.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Forwards the event."""
        if not self._is_replaying:
            self._handler.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Forwards the header, and keeps it if it delimits the body."""
        if not self._is_replaying:
            if name.lower() in _FRAMING:
                self._framing.append((name, value))
            self._handler.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Forwards the event."""
        if not self._is_replaying:
            self._handler.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Forwards the event."""
        self._handler.on_body(body)

    def on_message_complete(self) -> None:
        """Forwards the event, except right after a head with an upgrade: the body has yet to arrive."""
        if not self._parser.should_upgrade():
            self._handler.on_message_complete()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Like uvicorn: data after a request with "Connection: close" is not an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _replace_parser(self) -> None:
        lines = b"".join(b"%b: %b\r\n" % header for header in self._framing)
        self._is_replaying = True
        self._parser = self._new_parser()
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
        finally:
            self._is_replaying = False
