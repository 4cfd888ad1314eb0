"""httptools' request parser, without protocol upgrades."""

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RequestParser:
    """Serves a request that offers an upgrade as an ordinary one, body included, as RFC 9110 (7.8) requires.

    httptools skips the body of such a request and then parses it as the next request. So after the head a second
    parser, which sees only the headers that delimit the body, reads on from where the first one stopped. Has those
    methods of ``httptools.HttpRequestParser`` that uvicorn calls.
    """

    def __init__(self, handler: HttpToolsProtocol) -> None:
        self._handler = handler
        self.is_muted = False
        """Whether the handler gets no events: the second parser reads the headers that it is given, which the handler
        has seen already, or the handler ignores the rest of the connection."""
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
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Returns False: no request upgrades."""
        return False

    def on_message_begin(self) -> None:
        if not self.is_muted:
            self._framing = []
            self._handler.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_muted:
            self._handler.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_muted:
            if name.lower() in _FRAMING:
                self._framing.append((name, value))
            self._handler.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.is_muted:
            self._handler.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.is_muted:
            self._handler.on_body(body)

    def on_message_complete(self) -> None:
        # Right after a head with an upgrade, the body has yet to arrive.
        if not self.is_muted and not self._parser.should_upgrade():
            self._handler.on_message_complete()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Like uvicorn: data after a request with "Connection: close" is not an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _replace_parser(self) -> None:
        lines = b"".join(b"%b: %b\r\n" % header for header in self._framing)
        was_muted, self.is_muted = self.is_muted, True
        self._parser = self._new_parser()
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
        finally:
            self.is_muted = was_muted
