"""Runs the engines by turns: repetition after repetition, each engine once, through all workloads.

An engine starts anew for each turn and ends with it. So no idle engine's threads spin beside another's, nor do they
share memory that would not hold them all, and what changes about the machine in the course of hours falls on all alike.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from cpu_bench import results, workloads
from cpu_bench.engines import Engine
from cpu_bench.metering import ForeignLoad, MemoryMeter
from cpu_bench.report.timing import goodput, later_turns, timing
from cpu_bench.results import Measured, Row
from cpu_bench.wire import Ran, Ready, Work
from cpu_bench.workloads import OpenLoop

ANSWER_LIMIT_S = 1200.0
"""To start, or to run a set."""
END_LIMIT_S = 30.0
SETTLE_S = 15.0
"""The pause between an engine's start and its first request. Some, such as ours, still allocate memory then."""
READ_BYTES = 16 << 20
LONG_S = 30.0
"""A run that needs none before it that is not measured."""


class EngineFailed(Exception):
    """It did not start, or broke. The text says how."""


class EngineUnsupported(EngineFailed):
    """This machine cannot run it. The text says why."""


class Session(Protocol):
    """An engine that takes requests."""

    ready: Ready

    def run(self, work: Work) -> Ran:
        """Runs a set. Raises EngineFailed."""
        ...


@dataclass(frozen=True)
class Turn:
    """How often a workload runs in one turn."""

    unmeasured: int
    measured: int

    @classmethod
    def of(cls, model: str, workload: str, earlier_s: float = 0.0) -> "Turn":
        """What takes under a second is measured more often; what takes half a minute is warm after a few steps, and so
        is an engine that took so long for the same workload before (``earlier_s``)."""
        if workload not in workloads.AT_ONCE:
            return cls(0, 1)
        if model == "M0":
            return cls(1, 5)
        return cls(1, 1) if workload in ("W1", "W4") and earlier_s < LONG_S else cls(0, 1)


Start = Callable[[Engine, str, Sequence[str]], "Any"]
"""A context manager of a Session, from an engine, a model and the workloads of the turn."""


class Driver:
    """Collects what the engines give. ``missing`` has those that gave nothing, or broke, and why; ``unsupported`` those
    that this machine cannot run, by label."""

    def __init__(self, engines: Sequence[Engine], peers: Path, start: Start, told: Callable[[Measured], None]) -> None:
        self._engines = engines
        self._peers = peers
        self._start = start
        self._told = told
        self.missing: dict[str, str] = {}
        self.unsupported: dict[str, str] = {}
        self.measured: list[Measured] = []
        self.open_loops: dict[tuple[str, str], OpenLoop] = {}
        """W5's arrivals by model and precision."""

    def run(self, model: str, names: Sequence[str], repetitions: Iterable[int], *, repeat_all: bool = False) -> None:
        """All engines, by turns, through the workloads of these names. Where one has been found far behind, it is not
        repeated, unless ``repeat_all``: the slowest take most of the time and change no ratio."""
        for repetition in repetitions:
            behind = set() if repeat_all else {(label, name) for name in names for label in self._behind(model, name)}
            for engine in self._engines:
                key = f"{engine.label} on {model}"
                worthwhile = [name for name in names if (engine.label, name) not in behind]
                if key in self.missing or engine.label in self.unsupported or not worthwhile:
                    continue
                why = engine.missing(self._peers, model)
                if why is None:
                    try:
                        self._turn(engine, model, worthwhile, repetition)
                    except EngineUnsupported as failure:
                        self.unsupported[engine.label] = str(failure)
                        print(f"{engine.label}: {failure}", file=sys.stderr, flush=True)
                    except EngineFailed as failure:
                        why = str(failure)
                if why is not None:
                    self.missing[key] = why
                    print(f"{key}: {why}", file=sys.stderr, flush=True)

    def _behind(self, model: str, name: str) -> set[str]:
        """Labels of the engines that the figures so far tell to be far behind on a workload."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for engine in self._engines:
            if runs := self._of(engine, model, name):
                rows[engine.precision].append(Row(engine, runs))
        return {label for of_one in rows.values() for label in results.far_behind(of_one)}

    def _of(self, engine: Engine, model: str, name: str) -> tuple[Measured, ...]:
        """What it has given so far on a workload."""
        wanted = (engine.label, model, name)
        return tuple(run for run in self.measured if (run.engine, run.model, run.workload) == wanted)

    def _turn(self, engine: Engine, model: str, names: Sequence[str], repetition: int) -> None:
        with self._start(engine, model, names) as session:
            session.run(workloads.work("warm", repetition))
            for name in names:
                try:
                    self._workload(session, engine, model, name, repetition)
                except (EngineFailed, ValueError) as error:
                    raise EngineFailed(f"{name}: {error}") from None

    def _workload(self, session: Session, engine: Engine, model: str, name: str, repetition: int) -> None:
        turn = Turn.of(model, name, max((run.wall_s for run in self._of(engine, model, name)), default=0.0))
        open_loop = self.open_loops.get((model, engine.precision)) if name == workloads.OPEN_LOOP else None
        for number in range(turn.unmeasured + turn.measured):
            # No two sets that an engine sees in one turn have an id in common but by chance.
            work = workloads.work(name, repetition * 100 + number, open_loop)
            if number < turn.unmeasured:
                session.run(work)
                continue
            foreign = ForeignLoad()
            with MemoryMeter(session.ready.pid) as memory:
                ran = session.run(work)
            others_s = foreign.seconds()
            measured = Measured(
                engine.label, model, name, repetition, session.ready.version,
                ready_s=session.ready.ready_s or 0.0, rss_bytes=memory.peak_bytes,
                pss_bytes=memory.proportional_bytes(), foreign_s=others_s, **figures(work, ran, open_loop),
            )  # fmt: skip
            self.measured.append(measured)
            self._told(measured)


def figures(work: Work, ran: Ran, open_loop: OpenLoop | None) -> dict[str, Any]:
    """Returns the fields of ``Measured`` that follow from a run, with the extra figures of W5 and W6."""
    found = timing(work, ran, open_loop.warm_up_s if open_loop else 0.0)
    extra = dict(ran.extra)
    if open_loop is not None:
        extra |= goodput(ran, open_loop)
    if work.turns > 1:
        extra |= later_turns(work, ran)
    return {"extra": extra, **found}


class RunnerProcess:
    """A runner, spoken to as ``wire`` says."""

    def __init__(self, process: "subprocess.Popen[str]", log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        began = time.perf_counter()
        self.ready = Ready(**self._receive()["ready"])
        if self.ready.ready_s is None:
            self.ready.ready_s = time.perf_counter() - began

    def run(self, work: Work) -> Ran:
        """Runs a set. Raises EngineFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(work)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said before tells why
        return Ran(**self._receive(ANSWER_LIMIT_S + max(work.arrivals_s, default=0.0)))

    def _receive(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(limit_s, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise EngineFailed(self._last_words())
        message: dict[str, Any] = json.loads(line)
        if "unsupported" in message:
            raise EngineUnsupported(message["unsupported"])
        if "failed" in message:
            raise EngineFailed(message["failed"])
        return message

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"it ended; its last words: {lines[-1].strip()[:300]}" if lines else "it ended without a word"


def read_once(path: Path) -> None:
    """All files of a model, so that each engine finds them in the system's cache: some systems soon drop from it what
    nobody reads."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(READ_BYTES):
                    pass


def process_starter(peers: Path, threads: int, settle_s: float = SETTLE_S) -> Start:
    """Starts engines' runners in their environments."""

    @contextmanager
    def start(engine: Engine, model: str, names: Sequence[str]) -> Iterator[Session]:
        read_once(engine.path(peers, model))
        variables: Mapping[str, str] = {**os.environ, **engine.environment_variables(peers, threads)}
        with tempfile.TemporaryFile() as log:
            command = engine.command(peers, model, threads, names)
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
            try:
                runner = RunnerProcess(process, log)
                time.sleep(settle_s)
                yield runner
            finally:
                _end(process)

    return start


def _end(process: "subprocess.Popen[str]") -> None:
    """Closes its stdin, which ends it; the harder the longer it takes. Then ends what it left behind, if anything."""
    assert process.stdin is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    for harder in (process.terminate, process.kill):
        try:
            process.wait(END_LIMIT_S)
            break
        except subprocess.TimeoutExpired:
            harder()
    process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    assert process.stdout is not None
    process.stdout.close()
