"""The format of a step log, who writes it, and what is refused."""

import json
from pathlib import Path

import msgspec
import pytest
from known_requests import ENGINE_VOCAB_SIZE
from simulations.step_logs import FACTS, LIMITS, header, random_steps, write_log
from waiting import until, wait_until

from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.simulation.logged_executor import LoggedExecutor, StepLogFile
from penstock.scheduler.simulation.step_log import StepLogError, read_step_log
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.worker_config import MeasuredStep

HEADER = msgspec.json.encode(header()).decode()
STEP = msgspec.json.encode(random_steps(1)[0]).decode()


def test_what_is_written_is_read(tmp_path):
    steps = random_steps(20)
    first = header(measured_steps=(MeasuredStep(0, 16, 0, 1000),))
    log = read_step_log(write_log(tmp_path / "log", steps, first))
    assert log.header == first
    assert log.header.facts.num_blocks == FACTS.num_blocks
    assert log.steps == steps
    assert log.header.limits.max_num_seqs == LIMITS.max_num_seqs


def test_a_line_that_was_not_finished_is_ignored(tmp_path):
    path = write_log(tmp_path / "log", random_steps(3))
    path.write_bytes(path.read_bytes() + b'{"step": 9, "secon')
    assert len(read_step_log(path).steps) == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "log is empty; write the log again"),
        ('{"a": 1}\n', "line 1: not a step log; give a file that penstock serve --step-log wrote"),
        ("[1]\n", "line 1: not a step log"),
        ("\x00\xff\n", "line 1: not a step log"),
        (HEADER.replace('"step_log":1', '"step_log":2'), "line 1: its format is 2, and this penstock reads 1; write"),
        (HEADER.replace('"num_blocks":4000', '"num_blocks":0'), "facts.num_blocks is 0; it must be at least 1"),
        (HEADER.replace('"num_blocks":4000', '"num_blocks":"x"'), r"line 1: Expected `int`, got `str` - at `\$.facts"),
        (HEADER.replace('"fcfs"', '"lifo"'), "line 1: Invalid enum value 'lifo'"),
        (HEADER[:-2] + ',"pipeline_parallel_size":2}}', "line 1: comes from a model in 2 stages, whose times overlap"),
        (f"{HEADER}\n{STEP}\nx", "line 3: not a step: .*; remove the line, or write the log again"),
        (f"{HEADER}\n{{}}", "line 2: not a step: Object missing required field `step`"),
        (f'{HEADER}\n{STEP.replace("0.5", "NaN")}', "line 2: not a step: JSON is malformed"),
        (f'{HEADER}\n{STEP.replace("0.5", "-0.5")}', r"line 2: not a step: Expected `float` >= 0.0 - at `\$.waited_s`"),
        (f'{HEADER}\n{STEP.replace("0.5", "1e999")}', "line 2: not a step: "),
        (f'{HEADER}\n{STEP.replace("0.5", "null")}', r"line 2: not a step: Expected `float`, got `null`"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, content, problem):
    path = tmp_path / "log"
    path.write_text(content if not content or content.endswith("\n") else f"{content}\n", encoding="latin-1")
    with pytest.raises(StepLogError, match=problem) as error:
        read_step_log(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StepLogError, match=r"cannot read .*/none: No such file or directory"):
        read_step_log(tmp_path / "none")


async def test_the_steps_of_an_engine_are_logged(submit, tmp_path):
    path = tmp_path / "log"
    inner = FakeExecutor(vocab_size=ENGINE_VOCAB_SIZE, max_num_batched_tokens=64)
    engine = Engine(LoggedExecutor(inner, StepLogFile(path), LIMITS, "1.2.3", 5), LIMITS)
    facts = await engine.start()
    requests = [submit(engine, str(n), first=n, max_tokens=9, max_drafts=2 * (n % 2)) for n in range(6)]
    await until(lambda: all(received.finished for received in requests))
    counters = engine.counters
    await engine.stop()
    log = read_step_log(path)
    assert log.header.facts == facts
    assert (log.header.penstock, log.header.max_drafts) == ("1.2.3", 5)
    assert [step.step for step in log.steps] == list(range(len(log.steps)))
    assert sum(step.prefill_tokens for step in log.steps) == counters.prefill_tokens
    assert 0 < sum(step.decodes for step in log.steps) <= counters.decode_rows
    assert sum(step.drafts for step in log.steps) == counters.speculation.drafted > 0
    assert sum(step.accepted for step in log.steps) == counters.speculation.accepted
    assert max(step.decodes for step in log.steps) > 1
    for earlier, later in zip(log.steps, log.steps[1:], strict=False):
        assert earlier.answered_s <= later.answered_s
    for step in log.steps:
        assert step.submitted_s <= step.answered_s
        assert step.decodes * 20 <= step.decode_kv <= step.decodes * 30


async def test_the_log_goes_on_after_a_restart_of_the_worker(submit, tmp_path):
    path = tmp_path / "log"
    inner = FakeExecutor(vocab_size=ENGINE_VOCAB_SIZE)
    engine = Engine(LoggedExecutor(inner, StepLogFile(path), LIMITS, "1.2.3"), LIMITS, restart_delay_s=0.0)
    await engine.start()
    received = submit(engine, "one", max_tokens=500)
    await until(lambda: received.token_ids)
    inner.die()
    await until(lambda: received.finished)
    await engine.stop()
    assert inner.num_starts == 2
    lines = path.read_text().splitlines()
    assert ["facts" in json.loads(line) for line in lines] == [True, *[False] * (len(lines) - 1)]
    prefills = [step.prefill_tokens for step in read_step_log(path).steps if step.prefill_tokens]
    assert len(prefills) == 2


def test_a_full_disk_ends_the_log_and_nothing_else(caplog):
    file = StepLogFile(Path("/dev/full"))
    for step in random_steps(3):
        file.write(step)
    file.flush()
    wait_until(lambda: "cannot be written (No space left on device)" in caplog.text)
    assert caplog.text.count("--step-log /dev/full") == 1


async def test_what_the_other_executor_refuses_is_refused(tmp_path):
    inner = FakeExecutor()
    executor = LoggedExecutor(inner, StepLogFile(tmp_path / "log"), LIMITS, "1")
    await executor.start()
    executor.kill("it hangs")
    with pytest.raises(ExecutorError, match="it hangs"):
        async for _ in executor.results():
            pass
    await executor.stop()
