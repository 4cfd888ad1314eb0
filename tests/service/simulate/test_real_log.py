"""The log of a real service, from its first line to a simulation."""

import asyncio
import json
from pathlib import Path

import pytest

from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import run
from penstock.clients.bench.workload import ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.host.reloaded_files import FileError
from penstock.scheduler.simulation.logged_executor import LoggedExecutor
from penstock.scheduler.simulation.step_log import read_step_log
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.embedded import local_service
from penstock.service.app.serve import logged
from penstock.service.app.server_config import ServerConfig
from penstock.service.simulate.command import main


async def send(target, number):
    load = RandomLoad(4000, ClosedLoop(6), number, Uniform(20, 200), Uniform(8, 40))
    async with GrpcCaller(ConnectionOptions(target)) as caller:
        return await run(load, caller)


def test_a_service_logs_its_steps_and_a_simulation_needs_nothing_else(tmp_path, capsys):
    log = tmp_path / "steps.jsonl"
    with local_service("demo", step_log=log, kv_cache_memory_bytes="64M", max_num_seqs=8) as target:
        report = asyncio.run(send(target, 24))
    assert len(report.ok) == 24
    steps = read_step_log(log).steps
    assert sum(step.prefill_tokens for step in steps) >= sum(record.prompt_tokens for record in report.ok)
    assert sum(step.decodes + step.accepted for step in steps) >= sum(record.output_tokens - 1 for record in report.ok)
    assert all(step.seconds > 0 and step.answered_s > step.submitted_s for step in steps)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 100, "max_tokens": 20}\n' * 5)
    assert main([str(trace), "--step-log", str(log), "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fit"]["steps"] == len(steps)
    assert content["runs"][0]["settings"]["max_num_seqs"] == 8
    assert content["runs"][0]["summary"]["requests"]["ok"] == 5


async def test_steps_are_logged_only_if_a_file_is_given(tmp_path):
    executor = FakeExecutor()
    assert logged(executor, ServerConfig("name")) is executor
    assert isinstance(logged(executor, ServerConfig("name", step_log=tmp_path / "log")), LoggedExecutor)


async def test_a_file_that_cannot_be_written_is_refused_at_the_start():
    problem = r"--step-log /none/x: cannot be written \(No such file or directory\); give a file in a directory"
    with pytest.raises(FileError, match=problem):
        logged(FakeExecutor(), ServerConfig("name", step_log=Path("/none/x")))
