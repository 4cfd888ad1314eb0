"""Files that may be exchanged while the service runs: keys, tokens' keys, certificates, tenants.

A file counts as changed when what is in it is, however that came: written in place, replaced by a rename, or behind a
symbolic link that points elsewhere now, as Kubernetes mounts secrets. It is used when two looks in a row have read the
same, since half of what is being written may be valid too: fewer keys, no limits. What cannot be used is told once, and
what was read before holds on.
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

LOOK_INTERVAL_S = 1.0
_SETTLED_S = 2.0
"""A file that was touched less than this ago is read again, since a clock of 4 ms cannot tell two writes apart."""

_Signature = tuple[int, int, int, int]
_Loaded = TypeVar("_Loaded")


class FileError(Exception):
    """A file that the operator named cannot be used. The text is one line that names its flag, the place and the
    remedy, and never a secret."""


class TooEarly(FileError):
    """It cannot be used yet, and later as it is: unlike others it is tried again though it stays the same."""


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file, and the flag that names it."""

    flag: str
    path: Path

    def __str__(self) -> str:
        """As errors begin."""
        return f"{self.flag} {self.path}"

    def read(self) -> bytes:
        """Raises FileError."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise FileError(f"{self}: cannot be read ({error.strerror}); check the path") from error

    def read_text(self) -> str:
        """Raises FileError, also for what is no UTF-8."""
        return self.text(self.read())

    def text(self, content: bytes) -> str:
        """What was read, as text. Raises FileError."""
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise FileError(f"{self}: is no text in UTF-8; is it the right file?") from None


class Watched(Protocol):
    """Something that is made of files."""

    def refresh(self) -> Callable[[], None] | None:
        """Reads what changed; returns what takes it into use, or None where there is nothing new. Never raises."""
        ...


class WatchedFiles(Generic[_Loaded]):
    """Files of which together one thing is made. They are read when this is made, and by ``refresh``."""

    def __init__(
        self,
        files: Sequence[NamedFile],
        load: Callable[..., _Loaded],
    ) -> None:
        """``load`` gets the content of each file, in order, and raises FileError; it may take long. Raises
        FileError."""
        self._files = files
        self._names = ", ".join(map(str, files))
        self._load = load
        self._on_change: Callable[[_Loaded], None] = lambda _: None
        self._problem = ""
        self._seen = self._signatures()
        self._contents = [file.read() for file in files]
        self._last_read: list[bytes] | None = self._contents
        self._is_refused = False  # what was read last
        self.value = load(*self._contents)
        """What was made of the files last."""

    def on_change(self, callback: Callable[[_Loaded], None]) -> None:
        """``callback`` is given what is made of the files later on, on the event loop."""
        self._on_change = callback

    def refresh(self) -> Callable[[], None] | None:
        """See ``Watched``. Blocks, and touches nothing but this: it may run in a thread."""
        try:
            return self._look()
        except FileError as error:
            self._complain(str(error))
        except Exception as error:
            self._complain(f"{self._names}: could not be taken into use ({type(error).__name__})", with_trace=True)
        return None

    def _look(self) -> Callable[[], None] | None:
        seen = self._signatures()
        if seen is not None and seen == self._seen:
            return None
        before, self._last_read, self._seen = self._last_read, None, None
        contents = self._last_read = [file.read() for file in self._files]
        if contents == self._contents:
            if self._problem:
                _log.info("%s: as before", self._names)
            self._seen, self._problem = seen, ""
            return None
        if contents != before:
            self._is_refused = False
            return None  # the next look tells whether more is to come
        if self._is_refused:
            self._seen = seen
            return None
        loaded = self._load_new(contents)
        self._seen, self._contents, self._problem = seen, contents, ""
        return lambda: self._take(loaded)

    def _load_new(self, contents: list[bytes]) -> _Loaded:
        """Raises what ``load`` raises, and remembers it unless time alone may mend it: a large file takes seconds."""
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
            self._on_change(loaded)
        except Exception:
            _log.exception("%s: could not be taken into use", self._names)
            return
        _log.info("%s: changed, and in use from now on", self._names)

    def _complain(self, problem: str, *, with_trace: bool = False) -> None:
        if problem != self._problem:
            _log.error("%s; what was read before holds on", problem, exc_info=with_trace)
        self._problem = problem

    def _signatures(self) -> "list[_Signature] | None":
        """Tells files apart that differ; None where they cannot be told apart yet, or cannot be looked at."""
        found = []
        for file in self._files:
            try:
                status = os.stat(file.path)
            except OSError:
                return None
            if time.time() - status.st_ctime < _SETTLED_S:
                return None
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns))
        return found


class FileWatch:
    """Looks at files while the service runs."""

    def __init__(self, watched: Sequence[Watched], interval_s: float = LOOK_INTERVAL_S) -> None:
        self._watched = watched
        self._interval_s = interval_s
        self._look_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on; nothing where there are no files."""
        if self._watched:
            self._task = asyncio.create_task(self._run(), name="penstock file watch")

    def look_now(self) -> None:
        """Does not wait for the interval. What changed is used after the look that follows it."""
        self._look_now.set()

    def stop(self) -> None:
        """Looks no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), self._interval_s)
            self._look_now.clear()
            for watched in self._watched:
                try:
                    take = await asyncio.to_thread(watched.refresh)
                    if take is not None:
                        take()
                except Exception:  # no thread may be had: the watch must not end with that, nor without a word
                    _log.exception("a file could not be looked at; the next look follows")
