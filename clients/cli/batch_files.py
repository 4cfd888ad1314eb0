"""Reads and writes the two files of a batch: requests and results. Independent of sockets and progress bars.

``penstock generate --help`` has the formats. If ``n`` is above 1, ``choices`` replaces ``text``, ``token_ids`` and
``finish_reason``. The output for an invalid line also has its number as ``line``. A line with ``custom_id`` is in the
format of OpenAI's Batch API, and so is its output.
"""

import fcntl
import json
import os
import stat
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import penstock.v1 as pb
from penstock.clients.errors import InvalidOption, PenstockError, RequestFailed
from penstock.clients.events import Choice, Completion
from penstock.clients.output import Logprobs
from penstock.clients.requests import start_from_line

Id = str | int
BadLineKey = tuple[Id | None, int | None, str]
"""Identifies an invalid line across runs: its id, or else its number, and the problem."""

OPENAI_URLS = (
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
"""The URLs that a line in OpenAI's format may call."""


@dataclass(frozen=True, slots=True)
class Job:
    """A valid line."""

    id: Id
    start: pb.GenerationStart


@dataclass(frozen=True, slots=True)
class HttpJob:
    """A line in OpenAI's format: a POST of ``body``, which is JSON, to ``url``."""

    id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line, the problem, and its id if it has one."""

    line: int
    id: Id | None
    problem: str
    is_openai: bool = False

    @property
    def message(self) -> str:
        """The problem with the line's number."""
        return f"line {self.line}: {self.problem}"

    @property
    def key(self) -> BadLineKey:
        """Equal to the key of the same line in an earlier run."""
        return self.id, self.line if self.id is None else None, self.problem


def parse_line(number: int, raw: bytes, defaults: Mapping[str, object]) -> Job | HttpJob | BadLine | None:
    """Parses a line; returns None if it is blank. ``defaults`` are options for lines that do not set them."""
    if not raw.strip():
        return None
    try:
        value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        return BadLine(number, None, "not JSON: nested too deeply")
    except ValueError as error:
        return BadLine(number, None, f"not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, "expected a JSON object")
    if "custom_id" in value:
        return _parse_openai_line(number, value, defaults)
    identity = value.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        return BadLine(number, None, f"id: expected a string or an integer, got {json.dumps(identity)[:60]}")
    try:
        return Job(identity, start_from_line(value, defaults))
    except InvalidOption as error:
        return BadLine(number, identity, str(error))


def _parse_openai_line(number: int, value: Mapping[str, Any], defaults: Mapping[str, object]) -> HttpJob | BadLine:
    identity, url, body = value["custom_id"], value.get("url"), value.get("body")
    if not isinstance(identity, str) or not identity:
        return BadLine(number, None, f"custom_id: expected a string, got {json.dumps(identity)[:60]}", is_openai=True)
    if value.get("method", "POST") != "POST":
        problem = f"method: expected POST, got {json.dumps(value['method'])[:60]}"
    elif url not in OPENAI_URLS:
        problem = f"url: expected one of {', '.join(OPENAI_URLS)}, got {json.dumps(url)[:60]}"
    elif not isinstance(body, dict):
        problem = f"body: expected an object, got {json.dumps(body)[:60]}"
    elif body.get("stream"):
        problem = "body.stream: not supported in a batch; leave it out"
    elif defaults:
        problem = f"{min(defaults)}: flags do not apply to lines in OpenAI's format; set it in the body"
    else:
        return HttpJob(identity, str(url), json.dumps(body).encode())
    return BadLine(number, identity, problem, is_openai=True)


def bad_line_record(bad: BadLine) -> dict[str, object]:
    """Returns the output for an invalid line."""
    error = {"code": "INVALID_ARGUMENT", "message": bad.message}
    if bad.is_openai:
        return {"id": _new_openai_id(), "custom_id": bad.id, "line": bad.line, "response": None, "error": error}
    return {"id": bad.id, "line": bad.line, "error": error}


def http_record(identity: Id, status: int, request_id: str, body: object) -> dict[str, object]:
    """Returns the output for a line in OpenAI's format, from a response of any status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _new_openai_id(), "custom_id": identity, "response": response, "error": None}


def _new_openai_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def has_failed(record: Mapping[str, Any]) -> bool:
    """Whether an output line is an error."""
    response = record.get("response")
    status = response.get("status_code") if isinstance(response, dict) else None
    return record.get("error") is not None or (isinstance(status, int) and status >= 400)


def failure_record(identity: Id, failure: RequestFailed) -> dict[str, object]:
    """Returns the output for a failed request."""
    return {"id": identity, "error": {"code": failure.code.name, "message": failure.message}}


def answer_record(identity: Id, answer: Completion) -> dict[str, object]:
    """Returns the output for a successful request."""
    record: dict[str, object] = {"id": identity}
    if len(answer.choices) == 1:
        record |= _choice_record(answer.choices[0])
    else:
        record["choices"] = [{"index": i} | _choice_record(choice) for i, choice in enumerate(answer.choices)]
    if answer.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs_record(answer.prompt_logprobs)
    record["usage"] = asdict(answer.usage)
    return record


def _choice_record(choice: Choice) -> dict[str, object]:
    return {
        "text": choice.text,
        **({"reasoning": choice.reasoning} if choice.reasoning else {}),
        **({"tool_calls": [asdict(call) for call in choice.tool_calls]} if choice.tool_calls else {}),
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason.value,
        **({} if choice.logprobs is None else {"logprobs": _logprobs_record(choice.logprobs)}),
    }


def _logprobs_record(logprobs: Logprobs) -> dict[str, object]:
    """Returns log-probabilities, with the texts of tokens if there are any. Incomplete characters become U+FFFD."""
    record = asdict(logprobs)
    for name in ("chosen_texts", "top_texts"):
        texts: list[bytes] = record.pop(name)
        if texts:
            record[name] = [text.decode(errors="replace") for text in texts]
    return record


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class Results(ABC):
    """The output, and what it already contains."""

    def __init__(self) -> None:
        self.failed: dict[Id, bool] = {}
        """Whether a request's result is an error, by its id."""
        self.bad_lines: set[BadLineKey] = set()
        """The keys of invalid input lines."""

    @abstractmethod
    def write(self, record: Mapping[str, object]) -> None:
        """Writes a line. The operating system has it when this returns."""


class StreamResults(Results):
    """Results in a pipe or a terminal, which cannot be resumed. The caller closes it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, record: Mapping[str, object]) -> None:
        self._stream.write(_line(record))
        self._stream.flush()


class FileResults(Results):
    """Results in a file, possibly from an earlier run that was killed."""

    def __init__(self, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> None:
        """Opens or creates the file, locks it, and repairs its last line. Raises PenstockError."""
        super().__init__()
        self._path = path
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
        """Writes a line. Raises PenstockError if that fails, for example on a full disk; the next run repairs a partial
        line."""
        try:
            self._write_all(_line(record))
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Syncs the file to disk and closes it. Safe to call twice."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _open(self) -> FileIO:
        # Unbuffered: each write is a whole line, and a failed one leaves no buffered data.
        file = FileIO(self._path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise PenstockError(f"{self._path} is being written by another run") from None
        return file

    def _resume(self) -> None:
        """Reads the existing results and repairs the last line: adds a missing newline, or removes a partial line."""
        end = 0
        try:
            for record, record_end in _records(self._path):
                end = record_end
                self._note(record)
        except PenstockError:
            self._file.close()
            raise
        self._file.truncate(end)
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            self._file.write(b"\n")

    def _note(self, record: Mapping[str, Any]) -> None:
        line, identity = record.get("line"), record.get("custom_id", record["id"])
        known = identity if isinstance(identity, str | int) else None
        if isinstance(line, int):
            message = str((record.get("error") or {}).get("message"))
            self.bad_lines.add((known, line if known is None else None, message.partition(": ")[2]))
        elif known is not None:
            self.failed[known] = has_failed(record)

    def _take_out_failures(self) -> None:
        """Atomically replaces the file by one without errors. The target of a symbolic link is replaced, with its mode
        and owner; a file with several hard links is rewritten in place, so that all of them stay valid."""
        path, old = self._path.resolve(), os.fstat(self._file.fileno())
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
            try:
                for record, _ in _records(path):
                    if not has_failed(record):
                        new.write(_line(record))
                new.flush()
                os.fsync(new.fileno())
                if old.st_nlink > 1:
                    self._file.truncate(0)
                    self._write_all(Path(new.name).read_bytes())
                    return
                os.fchmod(new.fileno(), stat.S_IMODE(old.st_mode))
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(new.fileno(), old.st_uid, old.st_gid)
                os.replace(new.name, path)
            finally:
                Path(new.name).unlink(missing_ok=True)
        self._file.close()
        self._file = self._open()

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _unwritable(self, error: OSError) -> PenstockError:
        return PenstockError(f"cannot write {self._path}: {error.strerror}")


def _line(record: Mapping[str, object]) -> bytes:
    # Half of a surrogate pair, which JSON allows, has no UTF-8 encoding: it is written as an escape.
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


def _records(path: Path) -> Iterator[tuple[dict[str, object], int]]:
    """Yields the lines of an earlier run, each with the offset of its end, except a partial last one. Raises
    PenstockError if any other line is not a result."""
    end = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and "id" in record:
                end += len(raw)
                yield record, end
            elif raw.endswith(b"\n"):
                raise PenstockError(
                    f"{path}, line {number} is not a result; use another file, or --overwrite to start over"
                )
