"""The process in which the service checks grammars before it accepts their requests. Each grammar is compiled in a
child with limited time and memory, because some take minutes to compile or crash the process.

Messages are lines of JSON. The first has the arguments of ``read_tokenizer`` and the options of ``to_grammar``; each
later one has a grammar. Every message gets a reply. The process ends when the service closes its end of the pipe.
Nothing here starts a thread, because a forked child has only the thread that forked it.
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
"""CPU time for one grammar. The worker needs as long to compile it, once, and its first batch may have to wait."""
WALL_S = 4.0
"""How long to wait for a child that gets no CPU time. This is not the fault of its grammar."""
MEMORY_BYTES = 256 << 20
"""Memory of a child beyond that of its parent."""

TOO_COSTLY = f"it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to compile: make it smaller"
TOO_BUSY = "the machine is too busy to compile the constraint; try again"


def main() -> None:
    """Reads grammars from standard input and writes the results to standard output, until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Terminals and service managers send these to every process at once; the service decides when this one exits.
        signal.signal(number, signal.SIG_IGN)
    prepare_child(FED_BY_STRANGERS)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(requests.readline() or "null")
    if settings is None:
        return
    tokenizer: LLTokenizer | None = None
    try:
        tokenizer = read_tokenizer(**settings["tokenizer"])
        _answer(answers, {})
    except Exception as error:
        _answer(answers, {"error": one_line(str(error))})
    convert = partial(to_grammar, **settings["options"])
    del settings
    for line in requests if tokenizer is not None else ():
        wanted = json.loads(line)
        _answer(answers, _checked(tokenizer, wanted["kind"], wanted["text"], convert))


def _answer(answers: IO[bytes], answer: dict[str, str]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _checked(tokenizer: Any, kind: str, text: str, convert: Callable[[str, str], str]) -> dict[str, str]:
    """Returns the child's result, or an error if it ended without one. ``busy`` means that the child ran out of time
    before it had a result, and that another try may succeed."""
    deadline = time.monotonic() + WALL_S
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _in_child(tokenizer, kind, text, convert, writing)
        finally:
            os._exit(1)  # whatever happens, the child must not run the parent's code
    os.close(writing)
    output, has_ended = b"", False
    try:
        while (left := deadline - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
            part = os.read(reading, 1 << 20)
            if not part:
                has_ended = True
                break
            output += part
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with contextlib.suppress(ValueError):
        answer: dict[str, str] = json.loads(output)
        return answer
    return {"error": TOO_COSTLY} if has_ended else {"busy": TOO_BUSY}


def _in_child(tokenizer: LLTokenizer, kind: str, text: str, convert: Callable[[str, str], str], writing: int) -> None:
    """Writes the result for a grammar to ``writing``, unless the grammar exceeds the limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's last output before a crash is of no use
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
