"""A model whose ranks run on two hosts, as far as they know, gives the tokens of one process, also when a rank there is
lost. ``tests/service/hosts/test_two_namespaces.py`` has more."""

import os
import re
import signal

import psutil
import pytest
from hosts.agents import TOKEN, leader_settings, worker_command
from waiting import until, wait_until

from penstock.clients.host.distribution import installed_version
from penstock.models.backends.distributed import interface_to
from penstock.models.checkpoint.digest import digest_checkpoint
from penstock.models.executor.group import WorkerGroup
from penstock.models.executor.join.leader import Leader
from penstock.models.executor.join_messages import LeaderModel
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import EngineFinishReason

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=100, seed=2**63 + 11)


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_a_rank_on_another_host_is_killed_amid_8_streams(
    tiny_model, worker_config, in_process, start_engine, prompts, tmp_path, caplog, num_stages
):
    path = tiny_model("llama").path
    (tmp_path / "token").write_bytes(TOKEN.hex().encode())
    whole = await start_engine(in_process(path))
    kinds = [GREEDY, SAMPLED] * 4
    alone = [whole.submit(prompt, kind, 60) for prompt, kind in zip(prompts, kinds, strict=True)]
    await whole.finish(alone)
    settings = leader_settings(
        version=installed_version(),
        model=LeaderModel(str(path)),
        digest=digest_checkpoint(path, path, has_weights=True),
        token=TOKEN.hex().encode(),
        ranks_per_node=num_stages,
    )
    leader = Leader(settings)
    await leader.open()
    try:
        arguments = (f"localhost:{leader.port}", tmp_path / "token", tmp_path / "log", "--threads=1")
        with worker_command(*arguments) as agent:
            ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": num_stages}
            engine = await start_engine(WorkerGroup(worker_config(path, **ranks), leader))
            facts = engine.engine.facts
            assert (facts.tensor_parallel_size, facts.pipeline_parallel_size) == (2, num_stages)
            answers = [engine.submit(prompt, kind, 60) for prompt, kind in zip(prompts, kinds, strict=True)]
            await until(lambda: len(answers[0].token_ids) > 5)
            ranks_there = psutil.Process(agent.pid).children()
            assert len(ranks_there) == num_stages
            ranks_there[0].kill()
            await until(lambda: engine.engine.state is EngineState.RECOVERING)
            await engine.engine.wait_idle()
            assert {answer.finished.reason for answer in answers} == {EngineFinishReason.LENGTH}
            assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
            assert engine.stats.restarts == 1
            assert re.search(r"rank [123]: node rank 1 \(127.0.0.1\): the worker was ended by SIGKILL", caplog.text)
            agent.send_signal(signal.SIGTERM)
            assert agent.wait() == 0
            await until(lambda: "the agent is lost: " in caplog.text)
            await engine.engine.stop()
    finally:
        await leader.close()
    log = (tmp_path / "log").read_text()
    assert "joined localhost:" in log
    assert re.search("rank [123] has ended: the worker was ended by SIGKILL", log)
    assert "Traceback" not in log


def test_the_interface_is_the_one_that_routes_there():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("host.invalid") == ""


def test_a_worker_that_is_refused_ends_with_status_1_and_the_reason(tmp_path):
    (tmp_path / "token").write_bytes(b"short")
    with worker_command("127.0.0.1:1", tmp_path / "token", tmp_path / "log") as process:
        assert process.wait() == 1
    assert (tmp_path / "log").read_text().startswith("penstock worker: --join-token-file ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_waits_for_its_leader_ends_at_once(tmp_path, number):
    (tmp_path / "token").write_bytes(TOKEN)
    with worker_command("127.0.0.1:1", tmp_path / "token", tmp_path / "log") as process:
        wait_until(lambda: "cannot be reached" in (tmp_path / "log").read_text())
        os.kill(process.pid, number)
        assert process.wait() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
