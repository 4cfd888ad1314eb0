"""Loads read from a file: one line per request, with its arrival time, prompt and conversation."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.clients.bench.workload import DEFAULT_OPTIONS, Arrivals, BenchRequest, arrival_times, random_ids
from penstock.clients.errors import PenstockError

MAX_TOKENS = 1 << 24
"""The limit for a prompt or an output. No model supports more."""
MAX_ARRIVAL_S = 1e9
_FIELDS = ("arrival_s", "prompt_token_ids", "prompt_tokens", "max_tokens", "conversation")


class BadTrace(PenstockError):
    """An invalid line of a trace. The message contains the file, line and field."""


@dataclass(frozen=True)
class Trace:
    """The requests of a file. Each request of a conversation waits for the end of the previous one."""

    requests: Sequence[BenchRequest]
    arrivals: Arrivals | None = None
    """Replaces the arrival times of the file."""
    seed: int | str = 0
    name: str = "trace"

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def conversations(self) -> Iterator[Sequence[BenchRequest]]:
        """Yields conversations by the time of their first request, or in the order of the file if times are
        replaced."""
        requests = self.requests
        if self.arrivals is None:
            requests = sorted(requests, key=lambda request: request.arrival_s or 0.0)
        grouped: dict[str, list[BenchRequest]] = {}
        for request in requests:
            grouped.setdefault(request.conversation or f"\0{request.number}", []).append(request)
        if self.arrivals is None:
            yield from grouped.values()
            return
        for arrival, turns in zip(arrival_times(self.arrivals, self.seed), grouped.values(), strict=False):
            yield [replace(turn, arrival_s=None if at else arrival) for at, turn in enumerate(turns)]

    def __str__(self) -> str:
        return f"{self.name}, {self.arrivals or 'at its own times'}, seed {self.seed}"


@dataclass(frozen=True)
class TraceReader:
    """Reads traces. Prompts of which only the length is given are drawn from ``seed``."""

    vocab_size: int
    arrivals: Arrivals | None = None
    max_requests: int | None = None
    seed: int | str = 0
    options: Mapping[str, object] = field(default_factory=lambda: DEFAULT_OPTIONS)
    max_model_len: int | None = None
    """The limit of tokens in a conversation; None: it is not checked."""
    argument: str = "--trace"
    """The argument of the command line that names the file."""

    def read(self, path: Path) -> Trace:
        """Reads the trace in a file. Raises BadTrace."""
        requests: list[BenchRequest] = []
        lengths: dict[str, int] = {}
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if len(requests) == self.max_requests:
                        break
                    if line.strip():
                        where = f"{path.name}, line {number}"
                        requests.append(self._request(where, line, len(requests)))
                        self._check_fits(where, requests[-1], lengths)
        except OSError as error:
            raise BadTrace(f"{self.argument}: cannot read {path}: {error.strerror}; check the path") from None
        if not requests:
            raise BadTrace(f"{self.argument}: {path} has no requests; write one on each line")
        return Trace(requests, self.arrivals, self.seed, path.name)

    def _request(self, where: str, line: bytes, number: int) -> BenchRequest:
        try:
            values = json.loads(line)
        except RecursionError:
            raise BadTrace(f"{where}: not JSON: nested too deeply") from None
        except ValueError as error:
            raise BadTrace(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadTrace(f"{where}: expected an object, got {type(values).__name__}")
        if unknown := sorted(set(values) - set(_FIELDS)):
            raise BadTrace(f"{where}: {unknown[0]}: unknown field; the fields are {', '.join(_FIELDS)}")
        fields = _Fields(where, values)
        conversation = values.get("conversation")
        if conversation is not None and (isinstance(conversation, bool) or not isinstance(conversation, str | int)):
            raise fields.bad("conversation", "a string or a number")
        return BenchRequest(
            number=number,
            prompt_token_ids=self._prompt(fields, number),
            max_tokens=fields.integer("max_tokens"),
            arrival_s=fields.seconds("arrival_s") if self.arrivals is None else None,
            conversation="" if conversation is None else str(conversation),
            options=self.options,
        )

    def _check_fits(self, where: str, request: BenchRequest, lengths: dict[str, int]) -> None:
        """Raises BadTrace if a request is too long. ``lengths`` has the tokens of each conversation so far."""
        length = len(request.prompt_token_ids) + request.max_tokens
        if request.conversation:
            length = lengths[request.conversation] = lengths.get(request.conversation, 0) + length
        if self.max_model_len is not None and length > self.max_model_len:
            turns = "the conversation's turns" if request.conversation else "prompt and output"
            raise BadTrace(
                f"{where}: {turns} have {length:,} tokens, and the model takes {self.max_model_len:,}; shorten them, "
                "or set --max-model-len"
            )

    def _prompt(self, fields: "_Fields", number: int) -> list[int]:
        ids = fields.values.get("prompt_token_ids")
        if (ids is None) == (fields.values.get("prompt_tokens") is None):
            raise fields.bad("prompt_tokens", "either this or prompt_token_ids")
        if ids is None:
            return random_ids(random.Random(f"{self.seed}/{number}"), fields.integer("prompt_tokens"), self.vocab_size)
        if not isinstance(ids, list) or not ids:
            raise fields.bad("prompt_token_ids", "a list of token ids")
        for at, token_id in enumerate(ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                expected = f"a token id below {self.vocab_size:,}"
                raise BadTrace(f"{fields.where}: prompt_token_ids[{at}]: expected {expected}, got {token_id!r}")
        return ids


@dataclass(frozen=True)
class _Fields:
    where: str
    values: Mapping[str, object]

    def bad(self, name: str, expected: str) -> BadTrace:
        shown = repr(self.values[name])[:60] if name in self.values else "nothing"
        return BadTrace(f"{self.where}: {name}: expected {expected}, got {shown}")

    def integer(self, name: str) -> int:
        value = self.values.get(name)
        if type(value) is not int or not 1 <= value <= MAX_TOKENS:
            raise self.bad(name, f"a whole number from 1 to {MAX_TOKENS:,}")
        return value

    def seconds(self, name: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_ARRIVAL_S:
            raise self.bad(name, f"seconds, 0 to {MAX_ARRIVAL_S:,.0f} (or give --rate or --concurrency)")
        return float(value)
