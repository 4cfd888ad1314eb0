"""The two files of a batch: lines that ask, and lines that answer. Knows neither sockets nor progress bars.

A line in is a JSON object: ``id`` (text or an integer, unique), one of ``prompt``, ``prompt_token_ids`` and
``messages``, and options of the request under the contract's names. A line out is ``{"id", "text", "token_ids",
"finish_reason", "usage"}`` (``choices`` in place of the three in the middle where ``n`` is above 1), or
``{"id", "error": {"code", "message"}}``. The answer to a line that is no request bears its number as ``line`` besides.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol

from penstock.clients.errors import InvalidOption, PenstockError, RequestFailed
from penstock.clients.events import Choice, Completion, Logprobs
from penstock.clients.requests import start_from_line
from penstock.v1 import generation_pb2 as pb

Id = str | int


@dataclass(frozen=True, slots=True)
class Job:
    """A line that is a request."""

    id: Id
    start: pb.Start


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is none, and why; the id if it has one."""

    line: int
    id: Id | None
    message: str


def parse_line(number: int, raw: bytes, defaults: Mapping[str, object]) -> Job | BadLine | None:
    """What a line asks for; None if it is blank. ``defaults`` are options of lines that do not name them."""
    if not raw.strip():
        return None
    try:
        value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        return BadLine(number, None, f"line {number}: not JSON: nested too deeply")
    except ValueError as error:
        return BadLine(number, None, f"line {number}: not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, f"line {number}: expected a JSON object")
    identity = value.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        return BadLine(number, None, f"line {number}: id: expected text or an integer, got {json.dumps(identity)[:60]}")
    try:
        return Job(identity, start_from_line(value, defaults))
    except InvalidOption as error:
        return BadLine(number, identity, f"line {number}: {error}")


def bad_line_record(bad: BadLine) -> dict[str, object]:
    """The line out for a line that is no request."""
    return {"id": bad.id, "line": bad.line, "error": {"code": "INVALID_ARGUMENT", "message": bad.message}}


def failure_record(identity: Id, failure: RequestFailed) -> dict[str, object]:
    """The line out for a request that failed."""
    return {"id": identity, "error": {"code": failure.code.name, "message": failure.message}}


def answer_record(identity: Id, answer: Completion) -> dict[str, object]:
    """The line out for a request that was answered."""
    record: dict[str, object] = {"id": identity}
    if len(answer.choices) == 1:
        record |= _choice_record(answer.choices[0])
    else:
        record["choices"] = [{"index": i} | _choice_record(choice) for i, choice in enumerate(answer.choices)]
    if answer.prompt_logprobs is not None:
        record["prompt_logprobs"] = asdict(answer.prompt_logprobs)
    record["usage"] = asdict(answer.usage)
    return record


def _choice_record(choice: Choice) -> dict[str, object]:
    logprobs: Logprobs | None = choice.logprobs
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason.value,
        **({} if logprobs is None else {"logprobs": asdict(logprobs)}),
    }


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class Results(Protocol):
    """Where lines out go, and what is there already."""

    ids: set[Id]
    """Answered, well or not."""
    bad_lines: set[int]
    """Numbers of lines in that were no requests."""
    num_failed: int
    """Lines out with an error."""

    def write(self, record: Mapping[str, object]) -> None:
        """Adds a line; it is with the operating system before this returns."""

    def close(self) -> None:
        """Safe to call twice."""


class StreamResults:
    """Results that go to a pipe or a terminal: there is nothing to resume."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.ids: set[Id] = set()
        self.bad_lines: set[int] = set()
        self.num_failed = 0

    def write(self, record: Mapping[str, object]) -> None:
        """Adds a line and flushes it."""
        self.num_failed += "error" in record
        self._stream.write(_line(record))
        self._stream.flush()

    def close(self) -> None:
        """Leaves the stream open: it is the caller's."""


class FileResults:
    """Results in a file that an earlier run may have begun, and been killed over."""

    def __init__(self, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> None:
        """Opens or creates the file for this process alone, and mends its last line. Raises PenstockError."""
        self._path = path
        self.ids: set[Id] = set()
        self.bad_lines: set[int] = set()
        self.num_failed = 0
        try:
            self._file = self._open()
            if overwrite:
                self._file.truncate(0)
            elif retry_failed:
                self._take_out_failures()
            self._resume()
        except OSError as error:
            raise self._unwritable(error) from None

    def write(self, record: Mapping[str, object]) -> None:
        """Adds a line. Raises PenstockError if the disk is full, or the like; the next run mends a torn line."""
        self.num_failed += "error" in record
        rest = memoryview(_line(record))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Waits until the disk has it all."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: each write is a whole line, and one that fails leaves nothing behind to fail again.
        file = FileIO(self._path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise PenstockError(f"{self._path} is being written by another run") from None
        return file

    def _resume(self) -> None:
        """Notes what was answered, and mends the last line: one without its newline gets it if it is whole, and is cut
        off if it is torn."""
        end = 0
        try:
            for record, record_end in _records(self._path):
                end = record_end
                self.num_failed += "error" in record
                line, identity = record.get("line"), record["id"]
                if isinstance(line, int):
                    self.bad_lines.add(line)
                elif isinstance(identity, str | int):
                    self.ids.add(identity)
        except PenstockError:
            self._file.close()
            raise
        self._file.truncate(end)
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            self._file.write(b"\n")

    def _take_out_failures(self) -> None:
        """Replaces the file by one without its errors, whole or not at all."""
        new_path = self._path.with_name(self._path.name + ".new")
        with open(new_path, "wb") as new:
            for record, _ in _records(self._path):
                if "error" not in record:
                    new.write(_line(record))
            new.flush()
            os.fsync(new.fileno())
        os.replace(new_path, self._path)
        self._file.close()
        self._file = self._open()

    def _unwritable(self, error: OSError) -> PenstockError:
        return PenstockError(f"cannot write {self._path}: {error.strerror}")


def _line(record: Mapping[str, object]) -> bytes:
    # Half of a surrogate pair, as JSON may have it, has no UTF-8: it goes out as the escape that it came as.
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


def _records(path: Path) -> Iterator[tuple[dict[str, object], int]]:
    """The lines of an earlier run, each with the offset of its end; a torn last one is left out. Raises PenstockError
    if another is no line of results."""
    end = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                record = json.loads(raw)
            except ValueError:
                record = None
            if isinstance(record, dict) and "id" in record:
                end += len(raw)
                yield record, end
            elif raw.endswith(b"\n"):
                raise PenstockError(
                    f"{path}, line {number} is no line of results; name another file, or --overwrite to begin again"
                )
