"""Files that may be exchanged while the service runs: keys, tokens' keys, certificates, tenants.

A file counts as changed when what is in it is, however that came: written in place, replaced by a rename, or behind a
symbolic link that points elsewhere now, as Kubernetes mounts secrets. What cannot be used is told once, and what was
read before holds on.
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
        self._load = load
        self._on_change: Callable[[_Loaded], None] = lambda _: None
        self._problem = ""
        self._seen = self._signatures()
        self._contents = [file.read() for file in files]
        self.value = load(*self._contents)
        """What was made of the files last."""

    def on_change(self, callback: Callable[[_Loaded], None]) -> None:
        """``callback`` is given what is made of the files later on, on the event loop."""
        self._on_change = callback

    def refresh(self) -> Callable[[], None] | None:
        """See ``Watched``. Blocks, and touches nothing but this: it may run in a thread."""
        seen = self._signatures()
        if seen is not None and seen == self._seen and not self._problem:
            return None
        try:
            contents = [file.read() for file in self._files]
            if contents == self._contents and not self._problem:
                self._seen = seen
                return None
            # What could not be used may be usable now, as it is: a certificate that was not valid yet.
            loaded = self._load(*contents)
        except FileError as error:
            self._complain(str(error))
            return None
        except Exception:
            _log.exception("%s: could not be taken into use", ", ".join(map(str, self._files)))
            self._seen, self._contents = seen, contents
            return None
        self._seen, self._problem = seen, ""
        if contents == self._contents:
            _log.info("%s: as before", ", ".join(map(str, self._files)))
            return None
        self._contents = contents
        return lambda: self._take(loaded)

    def _take(self, loaded: _Loaded) -> None:
        self.value = loaded
        try:
            self._on_change(loaded)
        except Exception:
            _log.exception("%s: could not be taken into use", ", ".join(map(str, self._files)))
            return
        _log.info("%s: changed, and in use from now on", ", ".join(map(str, self._files)))

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            _log.error("%s; what was read before holds on", problem)
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
        """Does not wait for the interval."""
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
                take = await asyncio.to_thread(watched.refresh)
                if take is not None:
                    take()
