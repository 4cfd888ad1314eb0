"""The two files of a batch: lines that ask, and lines that answer. Knows neither sockets nor progress bars.

A line in is a JSON object: ``id`` (text or an integer, unique), one of ``prompt``, ``prompt_token_ids`` and ``messages``,
and options of the request under the contract's names. A line out is ``{"id", "text", "token_ids", "finish_reason",
"usage"}`` (``choices`` in place of the three in the middle where ``n`` is above 1), or ``{"id", "error": {"code",
"message"}}``. The answer to a line that is no valid request bears its number as ``line`` besides.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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
        # Half of a surrogate pair, as JSON may have it, has no UTF-8: it goes out as the escape that it came as.
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
        self._stream.write(line + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the stream open: it is the caller's."""


class FileResults(StreamResults):
    """Results in a file that an earlier run may have begun, and been killed over."""

    def __init__(self, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> None:
        """Opens or creates the file for this process alone, and mends its last line. Raises PenstockError."""
        try:
            self._file = _open_locked(path)
            super().__init__(self._file)
            if overwrite:
                self._file.truncate(0)
            elif retry_failed:
                self._file = self._stream = _without_failures(path, self._file)
            self._read(path)
        except OSError as error:
            raise PenstockError(f"cannot write {path}: {error.strerror}") from None

    def close(self) -> None:
        """Waits until the disk has it all."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _read(self, path: Path) -> None:
        """Notes what was answered, and leaves the file where the next line goes."""
        for record in _records(path, self._file):
            self.num_failed += "error" in record
            line, identity = record.get("line"), record["id"]
            if isinstance(line, int):
                self.bad_lines.add(line)
            elif isinstance(identity, str | int):
                self.ids.add(identity)


def _open_locked(path: Path) -> BinaryIO:
    file = open(path, "r+b" if path.exists() else "x+b")  # noqa: SIM115 - it is closed with the results
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise PenstockError(f"{path} is being written by another run") from None
    return file


def _records(path: Path, file: BinaryIO) -> Iterator[dict[str, object]]:
    """The lines of an earlier run. Of a last one without its newline, the newline is added if it is whole, and it is cut
    off if it is torn; afterwards the file stands at its end."""
    file.seek(0)
    end = 0
    for number, raw in enumerate(file, 1):
        whole = raw.endswith(b"\n")
        try:
            record = json.loads(raw)
        except ValueError:
            record = None
        if isinstance(record, dict) and "id" in record:
            yield record
        elif whole:
            raise PenstockError(
                f"{path}, line {number} is no line of results; name another file, or --overwrite to begin again"
            )
        else:
            break
        end += len(raw)
        if not whole:
            file.seek(end)
            file.write(b"\n")
            end += 1
            break
    file.seek(end)
    file.truncate()


def _without_failures(path: Path, file: BinaryIO) -> BinaryIO:
    """Replaces the file by one without its errors, whole or not at all."""
    new_path = path.with_name(path.name + ".new")
    with open(new_path, "wb") as new:
        copy = StreamResults(new)
        for record in _records(path, file):
            if "error" not in record:
                copy.write(record)
        os.fsync(new.fileno())
    os.replace(new_path, path)
    file.close()
    return _open_locked(path)
