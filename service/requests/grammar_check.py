"""Checks constraints before their requests are accepted, in a separate process: a hostile grammar can take a compiler
minutes, or exhaust its memory. Caches the results. Knows nothing about the grammars themselves."""

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict

import penstock.v1 as pb
from penstock.models.executor.child_process import child_environment
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.thread_pool import FairThreadPool

CHECKER = "from penstock.models.structured_output.check_process import main; main()"
"""Runs in another process; the service imports none of it, because its library may crash."""
START_TIMEOUT_S = 60.0
"""Enough for a large vocabulary on a busy machine."""
ANSWER_TIMEOUT_S = 5.0
"""A working process responds within 4 s, even on a busy machine."""
MAX_WAITING_BYTES = 8 << 20
MAX_KNOWN_BYTES = 16 << 20
_KNOWN_BYTES = 512
"""Memory of a cached result besides its text."""


class GrammarChecks:
    """Checks grammars, one at a time; tenants take turns."""

    def __init__(self, tokenizer: Tokenizer, closes_objects: bool = True) -> None:
        """``closes_objects``: whether objects may have only the properties that their schema declares, if it declares
        any and has no rule for others."""
        facts = tokenizer.facts
        special_tokens = list(facts.special_tokens)
        self._settings = {
            "tokenizer": {
                "directory": str(tokenizer.directory),
                "special_tokens": special_tokens,
                "num_ids": facts.num_ids,
                "eos_token_ids": list(facts.eos_token_ids),
                "added_tokens": list(facts.added_tokens),
            },
            "options": {
                "marker_ids": tokenizer.marker_ids,
                "forces": not tokenizer.spells_with_foreign,
                "closes_objects": closes_objects,
                "added_ids": tokenizer.added_ids,
                "eos_token_ids": list(facts.eos_token_ids),
            },
        }
        self._lane = FairThreadPool("grammars", 1, MAX_WAITING_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        """Used only by the pool's thread; None or ended after ``close``."""
        self._warming: asyncio.Task[None] | None = None
        self._is_unusable = False
        """Whether the tokenizer does not support grammars."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        """Results by the digest of the constraint. Guarded by the lock, like their size."""
        self._known_bytes = 0

    def warm(self) -> None:
        """Starts the process in the background, so that no request waits for it."""
        self._warming = asyncio.create_task(self._warm())

    async def _warm(self) -> None:
        with contextlib.suppress(ServiceError):
            await self._lane.run(self._running, 0, "")

    async def grammar(self, constraint: pb.Constraint, tenant: str) -> str:
        """Returns the worker's grammar for a constraint whose fields are valid. Raises ServiceError."""
        kind = constraint.WhichOneof("kind")
        assert kind is not None
        if kind == "choices":
            text = json.dumps(list(constraint.choices.values), ensure_ascii=False)
        else:
            text = "" if kind == "any_json" else getattr(constraint, kind)
        key = hashlib.sha256(f"{kind} {text}".encode()).digest()
        answer = self._remembered(key)
        if answer is None:
            answer = await self._lane.run(functools.partial(self._request, key, kind, text), len(text), tenant)
        if "error" in answer:
            remedy = "change or omit it"
            raise invalid(f"constraint.{kind}", f"cannot be used as a constraint: {answer['error']}; {remedy}")
        if "busy" in answer:
            raise ServiceError(Reason.PREPARATION_FULL, answer["busy"])
        return answer["grammar"]

    def close(self) -> None:
        """Ends the process, even if it is busy."""
        if self._warming is not None:
            self._warming.cancel()
        self._lane.close()
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._end(self._process)

    def _remembered(self, key: bytes) -> dict[str, str] | None:
        with self._lock:
            answer = self._known.get(key)
            if answer is not None:
                self._known.move_to_end(key)
            return answer

    def _remember(self, key: bytes, answer: dict[str, str]) -> None:
        with self._lock:
            self._known[key] = answer
            self._known_bytes += _size(answer)
            while self._known_bytes > MAX_KNOWN_BYTES:
                _, oldest = self._known.popitem(last=False)
                self._known_bytes -= _size(oldest)

    # In the pool's thread ---------------------------------------------------------------------------------------------

    def _request(self, key: bytes, kind: str, text: str) -> dict[str, str]:
        answer = self._remembered(key)  # another request may have had the same meanwhile
        if answer is None:
            answer = self._answer({"kind": kind, "text": text})
            if "busy" not in answer:  # a temporary state, not a result
                self._remember(key, answer)
        return answer

    def _answer(self, question: dict[str, str]) -> dict[str, str]:
        for _ in range(2):  # if the process ends, for example for lack of memory, a new one is tried once
            process = self._running()
            answer = self._exchange(process, question, ANSWER_TIMEOUT_S)
            if answer is not None:
                return answer
            self._end(process)
        raise RuntimeError("the process that checks grammars does not respond")

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process; starts it if needed. Raises ServiceError if the tokenizer does not support grammars."""
        with self._lock:
            if self._is_closed:
                raise ServiceError(Reason.SHUTDOWN)
            if self._is_unusable:
                raise ServiceError(Reason.NO_GRAMMARS, field="constraint")
            if self._process is not None and self._process.poll() is None:
                return self._process
            if self._process is not None:
                self._end(self._process)
            # It shares the service's standard error, where it writes only internal errors.
            command = [sys.executable, "-P", "-c", CHECKER]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=child_environment(os.environ),
            )
        answer = self._exchange(self._process, self._settings, START_TIMEOUT_S)
        if answer is None or "error" in answer:
            self._end(self._process)
            self._is_unusable = answer is not None
            raise ServiceError(Reason.NO_GRAMMARS, field="constraint")
        return self._process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], question: object, timeout_s: float) -> dict[str, str] | None:
        """Writes one line and returns the parsed line that it gets back; None if there is none in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                    return None
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    return None
                line += part
        except (OSError, ValueError):  # the pipe is closed, at either end
            return None
        answer: dict[str, str] = json.loads(line)
        return answer

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with process:  # closes the pipes and waits
            process.kill()


def _size(answer: dict[str, str]) -> int:
    return _KNOWN_BYTES + sum(len(text) for text in answer.values())


def check_constraint(start: pb.GenerationStart) -> None:
    """Checks the fields of a request with a constraint. Raises ServiceError."""
    if start.constraint.WhichOneof("kind") is None:
        if any(tool.function.strict for tool in start.chat.tools):
            return  # only its beginning is set, for strict tools, which are ignored here
        raise invalid("constraint", "set one of its kinds, such as json_schema, or omit constraint")
    for field in ("ignore_eos", "allowed_token_ids"):
        if getattr(start.sampling, field):
            raise invalid("constraint", f"not together with {field}; omit one of them")
