"""The file with the gateway's own key, read again when it changes, so that a new key needs no restart."""

from pathlib import Path

from penstock.clients.errors import PenstockError
from penstock.clients.host.reloaded_files import FileError, NamedFile, WatchedFiles

CHECK_S = 5.0
_MAX_BYTES = 4096
_FLAG = "--api-key-file"


def read_key(path: Path) -> WatchedFiles[str]:
    """Reads the key in a file. Raises PenstockError, whose text does not contain the key."""
    file = _KeyFile(_FLAG, path)
    try:
        return WatchedFiles([file], file.key, "the key from before")
    except FileError as error:
        raise PenstockError(str(error)) from None


class _KeyFile(NamedFile):
    def read(self) -> bytes:
        """See ``NamedFile``."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise FileError(f"{_FLAG}: cannot read {self.path}: {error.strerror}") from None

    def key(self, content: bytes) -> str:
        """Returns the key. Raises FileError."""
        try:
            key = content.decode().strip()
        except UnicodeDecodeError:
            raise FileError(f"{_FLAG}: {self.path} is not a text file; is it the key's file?") from None
        if not (key and key.isascii() and key.isprintable() and len(key) <= _MAX_BYTES):
            raise FileError(f"{_FLAG}: {self.path} must hold one line of printable ASCII, at most {_MAX_BYTES:,} bytes")
        return key
