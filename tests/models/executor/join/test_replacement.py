"""What ends on another host ends the group; the next start has the other host again, with its own agent or another."""

import asyncio
import re
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
from hosts.agents import TOKEN, agent_process, leader_settings
from hosts.cut_proxy import CutProxy
from waiting import until

from penstock.models.executor.group import WorkerGroup
from penstock.models.executor.join import link as link_module
from penstock.models.executor.join.leader import Leader
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import StepPlan
from penstock.scheduler.worker_config import WorkerConfig

PLAN = StepPlan(0, [], [], [], [], [])
SILENCE_S = 2.5


def has_ended(process):
    """Whether it has, though it may still have to be reaped by its new parent."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Hosts:
    """Two ranks without a model, one of them on another host: an agent, behind a network that can be cut."""

    def __init__(self, stack):
        self.stack = stack
        self.leader = Leader(leader_settings())
        self.group: Any = WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=2), self.leader)
        self.network = CutProxy()

    async def start(self):
        await self.leader.open()
        self.port = await self.network.start(self.leader.port)
        self.start_agent()
        await self.group.start()

    def start_agent(self):
        self.agent = self.stack.enter_context(agent_process(self.port, SILENCE_S))

    def rank(self):
        [process] = psutil.Process(self.agent.pid).children()
        return process

    async def end(self):
        """The error with which the group ends."""
        with pytest.raises(ExecutorError) as caught:
            await anext(self.group.results())
        with pytest.raises(ExecutorError):
            self.group.submit(PLAN)
        return caught.value

    async def restart(self):
        await self.group.stop()
        await self.group.start()
        self.group.submit(PLAN)
        assert (await anext(self.group.results())).step == PLAN.step


@pytest.fixture
async def hosts(without_model, monkeypatch):
    without_model()
    monkeypatch.setattr(link_module, "MAX_SILENCE_S", SILENCE_S)
    with ExitStack() as stack:
        hosts = Hosts(stack)
        try:
            await hosts.start()
            yield hosts
        finally:
            await hosts.group.stop()
            await hosts.leader.close()
            await hosts.network.stop()


async def test_a_rank_on_another_host_that_ends_is_named(hosts):
    rank = hosts.rank()
    rank.kill()
    error = await hosts.end()
    assert str(error).startswith("rank 1: node rank 1 (127.0.0.1): the worker was ended by SIGKILL")
    assert not error.blames_step
    await hosts.restart()
    rank = hosts.rank()
    hosts.group.kill("a step took 31 s")
    error = await hosts.end()
    assert str(error) == "a step took 31 s"
    assert error.blames_step
    await hosts.restart()
    assert has_ended(rank)
    assert hosts.network.num_connections == 1


async def test_agents_and_leaders_that_end_end_the_ranks(hosts):
    rank = hosts.rank()
    hosts.agent.terminate()
    # A frame that was on its way to the agent turns the end of the connection into a reset.
    how = "(it closed the connection|the connection broke)"
    assert re.search(rf"rank 1: node rank 1 \(127\.0\.0\.1\): the agent is lost: {how}", str(await hosts.end()))
    await until(lambda: has_ended(rank))
    hosts.start_agent()  # another one takes the place
    await hosts.restart()
    rank = hosts.rank()
    await hosts.leader.close()
    await until(lambda: has_ended(rank))
    assert hosts.agent.poll() is None  # it waits for another leader


async def test_a_network_that_is_cut_and_healed_ends_the_group_once(hosts):
    rank = hosts.rank()
    hosts.network.cut()
    assert "the agent is lost: it sent nothing for" in str(await hosts.end())
    await until(lambda: has_ended(rank))  # the agent has seen it too
    restarting = asyncio.create_task(hosts.restart())
    hosts.network.heal()
    await restarting  # the same agent takes its place again


async def test_a_refusal_of_another_host_is_named(without_model):
    without_model(refuse="if config.tensor_parallel_rank: raise ModelError('--device cuda:0: cannot be used')")
    leader = Leader(leader_settings())
    await leader.open()
    group: Any = WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=2), leader)
    try:
        with agent_process(leader.port, SILENCE_S), pytest.raises(ExecutorError) as caught:
            await group.start()
        assert str(caught.value) == "node rank 1 (127.0.0.1): --device cuda:0: cannot be used"
    finally:
        await leader.close()


async def test_a_host_has_consecutive_ranks(without_model):
    without_model(
        refuse="assert (config.device, config.num_threads) == (f'cuda:{config.tensor_parallel_rank % 2}', 2), config"
    )
    leader = Leader(leader_settings(ranks_per_node=2))
    await leader.open()
    group: Any = WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=4, device="cuda", num_threads=4), leader)
    try:
        with agent_process(leader.port, SILENCE_S) as agent:
            await group.start()
            assert len(psutil.Process(agent.pid).children()) == 2
            assert [worker._rank for worker in group._workers[2:]] == [2, 3]
            await group.stop()
            assert psutil.Process(agent.pid).children() == []
    finally:
        await leader.close()


async def test_a_start_without_the_other_host_fails_after_the_timeout(without_model):
    without_model()
    leader = Leader(leader_settings(timeout_s=0.3, token=TOKEN))
    await leader.open()
    group: Any = WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=2), leader)
    try:
        with pytest.raises(ExecutorError, match=r"not all hosts joined within 0.3 s .*: node rank 1: it never came"):
            await group.start()
    finally:
        await leader.close()
