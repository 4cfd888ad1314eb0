"""The process that checks grammars before their requests are taken, started by the service. Each is compiled in a child
that has little time and memory, since some would take a compiler minutes, or the process with it.

Frames are lines of JSON: first what ``read_tokenizer`` takes and the options of ``to_grammar``, then grammars, one
after another; each is answered. Ends with the service, which closes its end. Nothing here starts a thread, so that a
child is whole.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from llguidance import LLTokenizer

from penstock.models.executor.child_process import FED_BY_STRANGERS, prepare_child
from penstock.models.structured_output.compiler import (
    GrammarError,
    compile_grammar,
    discreet,
    one_line,
    read_tokenizer,
    to_grammar,
)

CPU_S = 0.3
"""For one grammar. The worker takes as long for it, once, and its first batch may have to wait."""
WALL_S = 4.0
"""How long to wait for a child that gets no processor. That says nothing of its grammar."""
MEMORY_BYTES = 256 << 20
"""Besides what the process has."""

TOO_COSTLY = f"it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to compile: make it smaller"
TOO_BUSY = "the machine is too busy to compile the constraint; try again"


def main() -> None:
    """Answers grammars on standard output until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Terminals and service managers send these to every process at once; the service decides when this one ends.
        signal.signal(number, signal.SIG_IGN)
    prepare_child(FED_BY_STRANGERS)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    told = json.loads(requests.readline() or "null")
    if told is None:
        return
    tokenizer: LLTokenizer | None = None
    try:
        tokenizer = read_tokenizer(**told["tokenizer"])
        _answer(answers, {})
    except Exception as error:
        _answer(answers, {"error": one_line(str(error))})
    convert = partial(to_grammar, **told["options"])
    del told
    for line in requests if tokenizer is not None else ():
        wanted = json.loads(line)
        _answer(answers, _checked(tokenizer, wanted["kind"], wanted["text"], convert))


def _answer(answers: IO[bytes], answer: dict[str, str]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _checked(tokenizer: Any, kind: str, text: str, convert: Callable[[str, str], str]) -> dict[str, str]:
    """Returns the child's answer, or what its end says of the grammar. ``busy``: the child had no time to find out, and
    may succeed if asked again."""
    deadline = time.monotonic() + WALL_S
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _in_child(tokenizer, kind, text, convert, writing)
        finally:
            os._exit(1)  # whatever happens, nothing of the parent's runs here
    os.close(writing)
    said, has_ended = b"", False
    try:
        while (left := deadline - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
            part = os.read(reading, 1 << 20)
            if not part:
                has_ended = True
                break
            said += part
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with contextlib.suppress(ValueError):
        answer: dict[str, str] = json.loads(said)
        return answer
    return {"error": TOO_COSTLY} if has_ended else {"busy": TOO_BUSY}


def _in_child(tokenizer: LLTokenizer, kind: str, text: str, convert: Callable[[str, str], str], writing: int) -> None:
    """Says on ``writing`` what comes of a grammar, unless it takes too much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the library says as it dies is no news
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
    try:
        grammar = convert(kind, text)
        compile_grammar(tokenizer, grammar)
        answer = {"grammar": grammar}
    except GrammarError as error:
        answer = {"error": discreet(str(error), text)}
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    with os.fdopen(writing, "wb") as out:
        out.write(json.dumps(answer).encode())
