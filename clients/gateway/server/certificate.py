"""The certificate of HTTPS, read again when its files change, so that its renewal needs no restart."""

import logging
import ssl
from pathlib import Path

from penstock.clients.host.reloaded_files import FileError, NamedFile, WatchedFiles

CHECK_S = 5.0

_log = logging.getLogger(__name__)


class _PemFile(NamedFile):
    def read(self) -> bytes:
        """Returns the content; nothing if it cannot be read, which the check of the pair reports."""
        try:
            return self.path.read_bytes()
        except OSError:
            return b""


def certificate_files(context: ssl.SSLContext, chain: Path, key: Path) -> WatchedFiles[None]:
    """Returns the files of a chain and its private key, as PEM, which ``context`` has loaded already. When they change,
    new connections use them. Raises FileError."""

    def check(*_: bytes) -> None:
        try:
            # In an unused context: a key of another certificate would leave half of both. Without a password OpenSSL
            # would request one at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
        except OSError:  # an SSLError is one
            raise FileError(f"{chain} and {key} cannot be used together") from None

    def use(_: None) -> None:
        context.load_cert_chain(chain, key, password="")
        _log.warning("%s was read again", chain)

    files = WatchedFiles(
        [_PemFile("--http-tls-cert", chain), _PemFile("--http-tls-key", key)], check, "the certificate from before"
    )
    files.on_change = use
    return files
