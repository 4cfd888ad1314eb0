"""An agent that cannot join ends with a reason on both sides, and the leader waits on for the right one."""

import socket
import threading
from contextlib import suppress
from ipaddress import ip_network
from typing import Any

import pytest
from hosts.agents import DIGEST, TOKEN, FilesAlike, joining, leading, new_agent
from waiting import until

from penstock.models.errors import ModelError
from penstock.models.executor.join import leader as leader_module
from penstock.models.executor.join.agent import HostAgent
from penstock.models.executor.join.link import LINGER_S
from penstock.models.executor.join.refusal import JoinRefused
from penstock.scheduler.executor import ExecutorError


class OtherWeights(FilesAlike):
    digest = (DIGEST[0], b"other", DIGEST[2])


class OtherTokenizer(FilesAlike):
    digest = (DIGEST[0], b"other", b"other")


class OtherConfig(FilesAlike):
    digest = (b"other", *DIGEST[1:])


BOTH_TOKENS = "give --join-token-file to both or to neither"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "another token": ({}, {"token": b"x" * 32}, None, "wrong token: --join-token-file must have the same content on"),
    "no token": ({}, {"token": None}, None, f"the agent has no token, and the leader has one: {BOTH_TOKENS}"),
    "a token too many": ({"token": None}, {}, None, f"the agent has a token, and the leader has none: {BOTH_TOKENS}"),
    "another version": ({}, {"version": "9.9"}, None, "other version: the agent has penstock 9.9, and the leader"),
    "other weights": ({}, {}, OtherWeights(), "other weights: the model's weights on the agent's host and on the"),
    "another tokenizer": ({}, {}, OtherTokenizer(), "other weights: the model's weights and tokenizer on the agent's"),
    "another model": ({}, {}, OtherConfig(), "other weights: the model's config.json on the agent's host and on the"),
    "another configuration": (
        {"settings": {"--dtype": "auto"}}, {"settings": {"--dtype": "float32"}}, None,
        "other configuration: --dtype is float32 on the agent's host, and auto on the leader",
    ),
    "a rank that there is not": ({}, {"node_rank": 2}, None, "--node-rank 2: must be 1 to 1; 0 is the leader"),
    "the leader's rank": ({}, {"node_rank": 0}, None, "--node-rank 0: must be 1 to 1; 0 is the leader"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_refusal_that_stays_is_named_on_both_sides(case, caplog):
    settings, changes, model, reason = CASES[case]
    async with leading(**settings) as leader:
        with pytest.raises(JoinRefused) as caught:
            await new_agent(leader.port, model, **changes).run()
        assert str(caught.value).startswith(f"the leader 127.0.0.1:{leader.port} refused: {reason}")
        await until(lambda: f"refused a host that tried to join: 127.0.0.1: {reason}" in caplog.text)
        assert caplog.text.count("refused a host") == 1
        async with joining(new_agent(leader.port, token=settings.get("token", TOKEN))):  # the right one
            assert await leader.gather() == "127.0.0.1"


async def test_a_model_that_cannot_be_read_is_named_on_both_sides(caplog):
    def find(served):
        raise ModelError("none: no such directory")

    async with leading() as leader:
        agent = HostAgent(new_agent(leader.port)._settings, find)
        with pytest.raises(JoinRefused, match="the agent cannot use the model: none: no such directory"):
            await agent.run()
        await until(lambda: "127.0.0.1: the agent cannot use the model: none: no such directory" in caplog.text)


async def test_what_may_change_is_tried_again(caplog):
    caplog.set_level("INFO")
    async with leading() as leader, joining(new_agent(leader.port, node_rank=1)) as first:
        await leader.gather()
        async with joining(new_agent(leader.port)), joining(new_agent(leader.port, node_rank=1)):
            await until(lambda: "refused: no free rank: all 2 hosts have joined; trying again" in caplog.text)
            await until(lambda: "refused: --node-rank 1 is taken by 127.0.0.1; trying again" in caplog.text)
            [node], identity = leader.nodes, leader.nodes[0].identity
            first.cancel()
            await until(lambda: node.is_ready and node.identity != identity)  # one of the two has the place now


async def test_an_address_that_is_not_allowed_is_named_on_both_sides(caplog):
    async with leading(allowed=[ip_network("10.0.0.0/8")]) as leader, joining(new_agent(leader.port)):
        problem = "the address 127.0.0.1 is not in the leader's --join-allow"
        await until(lambda: f"127.0.0.1: {problem}" in caplog.text)
        await until(lambda: f"refused: {problem}; trying again" in caplog.text)


async def test_a_leader_that_is_not_there_yet_is_waited_for(caplog, unused_tcp_port):
    async with joining(new_agent(unused_tcp_port)):
        await until(lambda: "cannot be reached: Connect call failed" in caplog.text)
        async with leading(port=unused_tcp_port) as leader:
            await leader.gather()


@pytest.fixture
def unused_tcp_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def test_a_name_that_is_not_there_yet_is_tried_again(caplog):
    async with joining(new_agent(1, host="leader.invalid")):
        await until(lambda: "the leader leader.invalid:1 cannot be reached: " in caplog.text)


def test_every_refusal_comes_within_ten_seconds():
    assert leader_module.HANDSHAKE_S + LINGER_S < 10


async def test_the_error_names_all_that_is_missing_and_why(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(leader_module, "LOG_INTERVAL_S", 0.2)

    def find(served):
        threading.Event().wait(5)

    async with leading(num_nodes=4, timeout_s=1.0) as leader:
        slow = HostAgent(new_agent(leader.port, node_rank=2)._settings, find)
        async with joining(new_agent(leader.port, node_rank=1)), joining(slow):
            with suppress(JoinRefused):
                await new_agent(leader.port, token=b"x" * 32).run()
            with pytest.raises(ExecutorError) as caught:
                await leader.gather()
    assert str(caught.value) == (
        "--nnodes 4: not all hosts joined within 1 s (--join-timeout): node rank 2 (127.0.0.1): it has joined, and "
        "reads the model's files; node rank 3: it never came; refused 127.0.0.1: wrong token: --join-token-file must "
        "have the same content on both hosts"
    )
    assert not caught.value.blames_step
    assert caplog.text.count("waiting for other hosts: ") >= 3
    assert "node rank 3: it never came" in caplog.text


async def test_an_agent_takes_its_own_place_before_its_loss_is_seen(caplog):
    async with leading() as leader:
        agent = new_agent(leader.port)
        async with joining(agent):
            await leader.gather()
            link: Any = leader.nodes[0].link
            again = new_agent(leader.port)
            again._identity = agent._identity
            async with joining(again):
                await until(lambda: leader.nodes[0].link not in (link, None))
        assert link.is_lost
        assert "its agent has joined again" in caplog.text
