"""The driver: by turns, an engine that is missing or breaks is named and left out, and a real process is spoken to."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_bench.driver import Driver, EngineFailed, RunnerProcess, Session, Turn, process_starter
from cpu_bench.engines import Engine
from cpu_bench.results import Measured
from cpu_bench.wire import Ran, Ready, Work
from cpu_bench.workloads import OpenLoop


class Fake:
    """Gives a token a millisecond; breaks in the set of that number."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.ready = Ready("1.0", ready_s=2.0)
        self._left = breaks_at

    def run(self, work: Work) -> Ran:
        if self._left == 0:
            raise EngineFailed("out of memory")
        self._left = None if self._left is None else self._left - 1
        return Ran(0.0, 1.0, [[(0.001 * i, 1) for i in range(num_output)] for _, num_output in work.requests])


def engine(name: str, tmp_path: Path, *, installed: bool = True) -> Engine:
    if installed:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin/python").touch()
        (tmp_path / "models/M1").mkdir(parents=True, exist_ok=True)
    return Engine(name, "bf16", "bf16", "", "", "none", "." if installed else "elsewhere")


def drive(tmp_path: Path, fakes: dict[str, Fake | None], repetitions: int = 2) -> tuple[Driver, list[str]]:
    order: list[str] = []

    @contextmanager
    def start(one: Engine, model: str, names: Sequence[str]) -> Iterator[Session]:
        assert model == "M1"
        order.append(one.name)
        fake = fakes[one.name]
        assert fake is not None, "it is not installed"
        yield fake
        order.append(f"end of {one.name}")

    told: list[Measured] = []
    found = [engine(name, tmp_path, installed=fake is not None) for name, fake in fakes.items()]
    driver = Driver(found, tmp_path, start, told.append)
    driver.run("M1", ["W4"], range(repetitions))
    assert told == driver.measured
    return driver, order


def test_engines_take_turns_and_never_run_together(tmp_path: Path) -> None:
    driver, order = drive(tmp_path, {"a": Fake(), "b": Fake()})
    assert order == ["a", "end of a", "b", "end of b"] * 2
    assert [(run.engine, run.repetition) for run in driver.measured] == [
        ("a/bf16", 0), ("b/bf16", 0), ("a/bf16", 1), ("b/bf16", 1),
    ]  # fmt: skip
    assert driver.missing == {}
    one = driver.measured[0]
    assert (one.model, one.workload, one.version, one.ready_s) == ("M1", "W4", "1.0", 2.0)
    assert one.rss_bytes >= one.pss_bytes > 1 << 20


def test_a_turn_goes_through_all_workloads(tmp_path: Path) -> None:
    started = []

    @contextmanager
    def start(one: Engine, model: str, names: Sequence[str]) -> Iterator[Session]:
        started.append(one.name)
        yield Fake()

    driver = Driver([engine("a", tmp_path)], tmp_path, start, lambda measured: None)
    driver.run("M1", ["W1", "W4"], range(3, 5))
    assert started == ["a", "a"]
    assert [(run.workload, run.repetition) for run in driver.measured] == [("W1", 3), ("W4", 3), ("W1", 4), ("W4", 4)]


@pytest.mark.parametrize("repeat_all", [False, True])
def test_who_is_far_behind_on_a_workload_is_not_repeated_there(tmp_path: Path, repeat_all: bool) -> None:
    class Paced(Fake):
        """Takes a second for 16 requests, and for one as long as it is told."""

        def __init__(self, seconds: float) -> None:
            super().__init__()
            self._seconds = seconds

        def run(self, work: Work) -> Ran:
            ran = super().run(work)
            return Ran(ran.began, self._seconds if len(work.requests) == 1 else 1.0, ran.events)

    pace = {"penstock": Paced(9.0), "fast": Paced(1.0), "near": Paced(1.9), "slow": Paced(2.1)}
    found = [engine(name, tmp_path) for name in pace]
    driver = Driver(found, tmp_path, lambda one, model, names: nullcontext(pace[one.name]), lambda measured: None)
    driver.run("M1", ["W1", "W4"], range(3), repeat_all=repeat_all)
    times = Counter((run.engine, run.workload) for run in driver.measured)
    once = times.pop(("slow/bf16", "W4"))
    assert once == (3 if repeat_all else 1)
    assert set(times.values()) == {3}
    assert len(times) == 7


def test_what_is_not_installed_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, order = drive(tmp_path, {"a": None, "b": Fake()})
    assert list(driver.missing) == ["a/bf16 on M1"]
    assert "make bench-peers" in driver.missing["a/bf16 on M1"]
    assert "elsewhere/bin/python is not there" in capsys.readouterr().err
    assert order == ["b", "end of b"] * 2


def test_what_broke_is_named_once_and_not_tried_again(tmp_path: Path) -> None:
    # Warm, one that is not measured, one that is, warm; then it breaks.
    driver, order = drive(tmp_path, {"a": Fake(breaks_at=4), "b": Fake()}, repetitions=3)
    assert driver.missing == {"a/bf16 on M1": "W4: out of memory"}
    assert [run.engine for run in driver.measured] == ["a/bf16", "b/bf16", "b/bf16", "b/bf16"]
    assert order.count("a") == 2


def test_a_model_that_was_not_written_is_missing(tmp_path: Path) -> None:
    one = replace(engine("a", tmp_path), model="gguf/{model}.gguf")
    assert "gguf/M1.gguf is not there" in (one.missing(tmp_path, "M1") or "")


def test_short_runs_are_measured_more_often() -> None:
    assert Turn.of("M0", "W1").measured > Turn.of("M1", "W1").measured


def test_what_took_long_is_warm_without_a_run_that_is_not_measured(tmp_path: Path) -> None:
    sets = []

    class Slow(Fake):
        def run(self, work: Work) -> Ran:
            sets.append(len(work.requests))
            ran = super().run(work)
            return Ran(ran.began, 40.0 if len(work.requests) == 16 else 1.0, ran.events)

    driver = Driver(
        [engine("a", tmp_path)], tmp_path, lambda one, model, names: nullcontext(Slow()), lambda measured: None
    )
    driver.run("M1", ["W1", "W4"], range(2))
    assert sets == [4, 16, 16, 1, 1, 4, 16, 1, 1]


RUNNER = """
from cpu_bench.wire import Ran, Ready, Unsupported, run_engine

def main(wire, arguments):
    print("an engine that talks")
    if arguments.mode == "broken":
        raise MemoryError("it is\\nfull")
    if arguments.mode == "foreign":
        raise Unsupported("it needs another processor")
    if arguments.mode == "gone":
        import os
        os.write(2, b"first\\nterminate called\\n")
        os._exit(3)
    wire.ready(Ready(f"{arguments.model} with {arguments.threads}"))
    for work in wire.sets():
        events = [[(1.5, num_output)] for _, num_output in work.requests]
        wire.answer(Ran(1.0, 2.0, events, {"lag": work.pause_s}, work.arrivals_s))

run_engine(main, mode="")
"""


class Scripted(Engine):
    """An engine whose runner is a script."""

    def command(self, peers: Path, model: str, threads: int, workloads: Sequence[str]) -> list[str]:
        return [sys.executable, "-P", "-c", RUNNER, model, "--threads", str(threads), *self.flags]


def scripted(*flags: str) -> Engine:
    return Scripted("a", "bf16", "bf16", "", "", "none", "", flags=flags)


def test_a_runner_is_spoken_to(tmp_path: Path) -> None:
    with process_starter(tmp_path, 3, settle_s=0)(scripted(), "M1", ["W1"]) as session:
        assert session.ready.version == "M1 with 3"
        assert session.ready.ready_s > 0
        work = Work([([1, 2], 5)], [1.25], pause_s=0.5)
        assert session.run(work) == Ran(1.0, 2.0, [[[1.5, 5]]], {"lag": 0.5}, [1.25])  # type: ignore[list-item]
        assert isinstance(session, RunnerProcess)


@pytest.mark.parametrize(
    ("mode", "why"), [("broken", "^MemoryError: it is full$"), ("gone", "^it ended; its last words: terminate called$")]
)
def test_a_runners_exit_is_reported_with_its_cause(tmp_path: Path, mode: str, why: str) -> None:
    start = process_starter(tmp_path, 1, settle_s=0)
    with pytest.raises(EngineFailed, match=why), start(scripted("--mode", mode), "M1", []):
        pass


def test_an_engine_that_this_machine_cannot_run_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "models/M1").mkdir(parents=True)
    one = scripted("--mode", "foreign")
    driver = Driver([one], tmp_path, process_starter(tmp_path, 1, settle_s=0), lambda measured: None)
    driver.run("M1", ["W1"], range(2))
    assert (driver.unsupported, driver.missing) == ({"a/bf16": "it needs another processor"}, {})


def test_requests_that_arrive_by_themselves_have_a_figure_of_their_own(tmp_path: Path) -> None:
    class Punctual(Fake):
        def run(self, work: Work) -> Ran:
            arrivals = work.arrivals_s or [0.0] * len(work.requests)
            events = [[(at + 0.01, num_output)] for at, (_, num_output) in zip(arrivals, work.requests, strict=True)]
            return Ran(0.0, 10.0, events, arrivals=arrivals)

    driver = Driver([engine("a", tmp_path)], tmp_path, lambda *_: nullcontext(Punctual()), lambda measured: None)
    driver.open_loops["M1", "bf16"] = OpenLoop(5.0, warm_up_s=1.0, measured_s=4.0)
    driver.run("M1", ["W5"], range(2))
    assert [run.extra["arrivals_per_s"] for run in driver.measured] == [5.0, 5.0]
    assert all(run.extra["goodput_share"] == 1.0 for run in driver.measured)
    assert all(run.ttft_p50 == pytest.approx(10.0) for run in driver.measured)


def test_without_a_rate_there_is_no_figure_of_arrivals(tmp_path: Path) -> None:
    driver = Driver([engine("a", tmp_path)], tmp_path, lambda *_: nullcontext(Fake()), lambda measured: None)
    driver.run("M1", ["W5"], range(1))
    assert driver.missing == {"a/bf16 on M1": "W5: W5 needs a rate of arrivals; run W2 first, or set one"}


def test_only_conversations_get_their_flags(tmp_path: Path) -> None:
    one = Engine("a", "bf16", "bf16", "", "", "none", "", flags=("--a",), conversation_flags=("--b", "{model}"))
    assert one.command(tmp_path, "M1", 2, ["W1", "W4"])[-1:] == ["--a"]
    assert one.command(tmp_path, "M1", 2, ["W6"])[-3:] == ["--a", "--b", "M1"]
