"""Files that may change while a process runs: keys, certificates, tenants' limits.

A file has changed if its content has: it was written in place, replaced by a rename, or is behind a symbolic link that
points elsewhere now, as in Kubernetes secrets. New content is used once two checks in a row have read the same, since a
half-written file may be valid too, with fewer keys or no limits. Content that cannot be used is logged once, and the
previous content stays in use.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_SETTLED_S = 2.0
"""A file that changed less than this ago is read again: with a clock of 4 ms, two writes may have the same time."""

_Loaded = TypeVar("_Loaded")


class FileError(Exception):
    """An operator's file cannot be used. The text is one line with its flag, the place and the remedy, and never a
    secret."""


class TooEarly(FileError):
    """A file cannot be used yet. Unlike after other errors, it is tried again even if it stays the same."""


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file, and the flag that names it."""

    flag: str
    path: Path

    def __str__(self) -> str:
        """Returns the start of error messages."""
        return f"{self.flag} {self.path}"

    def read(self) -> bytes:
        """Returns the content. Raises FileError."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise FileError(f"{self}: cannot be read ({error.strerror}); check the path") from error

    def text(self, content: bytes) -> str:
        """Decodes the content. Raises FileError if it is not UTF-8."""
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise FileError(f"{self}: is not UTF-8 text; is it the right file?") from None


class Watched(Protocol):
    """A value that is made from files."""

    def refresh(self) -> Callable[[], None] | None:
        """Reads changed files. Returns a function that applies them, or None if nothing changed. Never raises."""


class WatchedFiles(Generic[_Loaded]):
    """Files that together make one value. They are read on creation, and by ``refresh``."""

    def __init__(
        self,
        files: Sequence[NamedFile],
        load: Callable[..., _Loaded],
        kept: str = "the previous content",
    ) -> None:
        """``load`` makes the value from the content of each file, in order; it may be slow, and may raise FileError.
        ``kept`` names what stays in use, for the log, if new content cannot be used. Raises FileError."""
        self.files = files
        """The files, in the order of the arguments of ``load``."""
        self._names = ", ".join(map(str, files))
        self._load = load
        self._kept = kept
        self.on_change: Callable[[_Loaded], None] = lambda _: None
        """Called with each new value, on the event loop."""
        self._problem = ""
        self._seen = self._signatures()
        self._contents = [file.read() for file in files]
        self._last_read: list[bytes] | None = self._contents
        self._is_refused = False  # whether ``load`` failed on the last content
        self.value = load(*self._contents)

    def refresh(self) -> Callable[[], None] | None:
        """See ``Watched``. Blocks, and changes only this object's own state, so it may run in a thread."""
        try:
            return self._check()
        except FileError as error:
            self._complain(str(error))
        except Exception as error:
            self._complain(f"{self._names}: could not be applied ({type(error).__name__})", with_trace=True)
        return None

    def _check(self) -> Callable[[], None] | None:
        seen = self._signatures()
        if seen is not None and seen == self._seen:
            return None
        before, self._last_read, self._seen = self._last_read, None, None
        contents = self._last_read = [file.read() for file in self.files]
        if contents == self._contents:
            if self._problem:
                _log.info("%s: has the content in use again", self._names)
            self._seen, self._problem = seen, ""
            return None
        if contents != before:
            self._is_refused = False
            return None  # the file may not be complete yet; the next check shows
        if self._is_refused:
            self._seen = seen
            return None
        loaded = self._load_new(contents)
        self._seen, self._contents, self._problem = seen, contents, ""
        return lambda: self._take(loaded)

    def _load_new(self, contents: list[bytes]) -> _Loaded:
        """Calls ``load``, and raises what it raises. It is not called again for the same content, since a large file
        takes seconds, unless the error may go away by itself."""
        try:
            return self._load(*contents)
        except (TooEarly, MemoryError):
            raise
        except Exception:
            self._is_refused = True
            raise

    def _take(self, loaded: _Loaded) -> None:
        self.value = loaded
        try:
            self.on_change(loaded)
        except Exception:
            _log.exception("%s: could not be applied", self._names)
            return
        _log.info("%s: changed, and in use from now on", self._names)

    def _complain(self, problem: str, *, with_trace: bool = False) -> None:
        if problem != self._problem:
            _log.error("%s; %s stays in use", problem, self._kept, exc_info=with_trace)
        self._problem = problem

    def _signatures(self) -> list[tuple[int, ...]] | None:
        """Returns what identifies the files' content; None if a file is too new to rely on it, or cannot be read."""
        found: list[tuple[int, ...]] = []
        for file in self.files:
            try:
                status = os.stat(file.path)
            except OSError:
                return None
            if time.time() - status.st_ctime < _SETTLED_S:
                return None
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns))
        return found


class FileWatch:
    """Checks files for changes while the process runs."""

    def __init__(self, watched: Sequence[Watched], interval_s: float = CHECK_INTERVAL_S) -> None:
        self._watched = watched
        self._interval_s = interval_s
        self._check_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to check, if there are files."""
        if self._watched:
            self._task = asyncio.create_task(self._run(), name="penstock file watch")

    def check_now(self) -> None:
        """Checks now instead of at the next interval. Changed files are used after the check that follows."""
        self._check_now.set()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), self._interval_s)
            self._check_now.clear()
            for watched in self._watched:
                try:
                    take = await asyncio.to_thread(watched.refresh)
                    if take is not None:
                        take()
                except Exception:  # such as no free thread; the watch must go on
                    _log.exception("a file could not be checked; the next check follows")
