"""``penstock serve`` and ``penstock worker`` in two network namespaces, under 32 streams: whatever happens to the
network or the other host, no token is lost, repeated or changed. Prints times."""

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts.agents import TOKEN, worker_command
from hosts.namespaces import ADDRESSES, TwoHosts, missing
from serve_process import PENSTOCK, serving

from penstock.clients import AsyncClient

pytestmark = pytest.mark.soak

NUM_STREAMS, NUM_TOKENS = 32, 160
PORT = 29501
SMALL = ("--kv-cache-memory-bytes=128M", "--threads=1")
REGEX = {"regex": "([a-z ]{10}){100}"}
"""Outputs that match it are longer than any of these."""
PROMPTS = [f"Chapter {number}. The man who" for number in range(NUM_STREAMS)]


@dataclass(frozen=True)
class Way:
    """How the two hosts share the model."""

    ranks: tuple[str, ...]
    flags: tuple[str, ...]


WAYS = {
    "tensor parallel, float32": Way(
        ("--tensor-parallel-size=2",), ("--backend=reference", "--dtype=float32", "--speculative-config=none")
    ),
    "stages, bfloat16": Way(("--pipeline-parallel-size=2",), ("--backend=cpu",)),
    "stages, int8": Way(("--pipeline-parallel-size=2",), ("--backend=cpu", "--quantization=int8")),
    "stages, float32": Way(("--pipeline-parallel-size=2",), ("--backend=cpu", "--dtype=float32")),
    "tensor parallel on each host, a stage on each": Way(
        ("--tensor-parallel-size=2", "--pipeline-parallel-size=2"),
        ("--backend=reference", "--dtype=float32", "--speculative-config=none"),
    ),
}
FAULTY = ("tensor parallel, float32", "stages, bfloat16")
"""The ways that go through all faults."""


@dataclass
class Stream:
    """One answer, and when its tokens came."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


async def read(client: AsyncClient, number: int, stream: Stream, num_tokens: int) -> None:
    sampling: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
    sampling |= {"constraint": REGEX} if number % 4 == 2 else {"ignore_eos": True}
    # Some repeat themselves, so that tokens are drafted; some have a prefix in common, which is cached.
    prompt = "one two three four " * 8 if number % 8 == 5 else PROMPTS[number]
    output = client.stream(prompt, max_tokens=num_tokens, **sampling)
    async for delta in output:
        stream.token_ids += delta.token_ids
        stream.times.append(time.monotonic())


async def streams_of(
    target: str, fault: Callable[[list[Stream]], Any] | None = None, num_tokens: int = NUM_TOKENS
) -> list[Stream]:
    """All streams at once, with a fault amid them."""
    streams = [Stream() for _ in PROMPTS]
    async with AsyncClient(target) as client:
        reads = [asyncio.create_task(read(client, number, stream, num_tokens)) for number, stream in enumerate(streams)]
        if fault is not None:
            while min(len(stream.token_ids) for stream in streams) < 10:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            await fault(streams)
        await asyncio.gather(*reads)
    return streams


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Way], list[list[int]]]:
    """Returns the tokens of one process with the flags of a way."""

    @functools.cache
    def tokens_of(way: Way) -> list[list[int]]:
        socket = f"unix:{tmp_path_factory.mktemp('one')}/socket"
        with serving("--listen", socket, *way.flags, *SMALL):
            return [stream.token_ids for stream in asyncio.run(streams_of(socket))]

    return tokens_of


@dataclass
class Cluster:
    """A leader in one namespace and an agent in the other."""

    hosts: TwoHosts
    target: str
    leader_log: Path
    stack: ExitStack
    start_agent: Callable[[], Any]
    agent: Any

    @property
    def agent_pid(self) -> int:
        return int(self.agent.pid)

    @property
    def rank_pid(self) -> int:
        rank, *_ = psutil.Process(self.agent_pid).children()
        return int(rank.pid)


@contextmanager
def cluster_of(tmp_path: Path, way: Way, **network: float) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    (tmp_path / "token").write_text(TOKEN.hex())
    (tmp_path / "token").chmod(0o600)
    target, log = f"unix:{tmp_path}/socket", tmp_path / "leader.log"
    with ExitStack() as stack:
        hosts = TwoHosts(**network)
        stack.callback(hosts.close)
        token = f"--join-token-file={tmp_path / 'token'}"
        where = (f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", token)

        def start_agent() -> Any:
            address, log = f"{ADDRESSES[0]}:{PORT}", tmp_path / "agent.log"
            prefix = hosts.prefix(1)
            return stack.enter_context(worker_command(address, tmp_path / "token", log, "--threads=1", prefix=prefix))

        agent = start_agent()
        command = ("sh", "-c", f'exec "$@" 2>>{log}', "sh", *hosts.prefix(0), PENSTOCK, "serve")
        flags = ("--nnodes=2", *way.ranks, *way.flags, *SMALL)
        stack.enter_context(serving("--listen", target, *where, *flags, command=command))
        yield Cluster(hosts, target, log, stack, start_agent, agent)


def report(name: str, began: float, streams: list[Stream], cluster: Cluster) -> None:
    """Prints how long streams stood still, and when the leader found what had happened."""
    gaps = [max(b - a for a, b in zip(s.times, s.times[1:], strict=False) if b > began) for s in streams]
    last = max(stream.times[-1] for stream in streams)
    found = "nothing was lost"
    for line in cluster.leader_log.read_text().splitlines():
        if "requests that wait" in line:
            at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() - (time.time() - time.monotonic())
            found = f"found after {at - began:.1f} s: {line.partition('engine: ')[2]}"
    sys.stdout.write(
        f"\n{name}: longest pause {max(gaps):.1f} s, all streams ended {last - began:.1f} s after it; {found}\n"
    )


async def cut_for(cluster: Cluster, seconds: float) -> None:
    cluster.hosts.cut()
    await asyncio.sleep(seconds)
    cluster.hosts.heal()


async def kill_rank(cluster: Cluster) -> None:
    os.kill(cluster.rank_pid, signal.SIGKILL)


async def stop_rank(cluster: Cluster) -> None:
    os.kill(cluster.rank_pid, signal.SIGSTOP)


async def kill_agent(cluster: Cluster) -> None:
    os.kill(cluster.agent_pid, signal.SIGKILL)
    cluster.agent = cluster.start_agent()


async def stop_agent(cluster: Cluster) -> None:
    os.kill(cluster.agent_pid, signal.SIGSTOP)
    await asyncio.sleep(20)
    os.kill(cluster.agent_pid, signal.SIGCONT)


FAULTS: dict[str, Callable[[Cluster], Any]] = {
    "the link is cut for 2 s": lambda cluster: cut_for(cluster, 2),
    "the link is cut for 60 s": lambda cluster: cut_for(cluster, 60),
    "kill -9 of the rank": kill_rank,
    "SIGSTOP of the rank": stop_rank,
    "kill -9 of the agent": kill_agent,
    "SIGSTOP of the agent for 20 s": stop_agent,
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name_of_way", WAYS)
def test_faults_lose_and_change_no_token(tmp_path, expected, name_of_way):
    way = WAYS[name_of_way]
    right = expected(way)
    with cluster_of(tmp_path, way) as cluster:
        assert [stream.token_ids for stream in asyncio.run(streams_of(cluster.target))] == right
        for name, fault in FAULTS.items() if name_of_way in FAULTY else ():
            began = 0.0

            async def inject(streams: list[Stream], fault: Any = fault) -> None:
                nonlocal began
                began = time.monotonic()
                await fault(cluster)

            cluster.leader_log.write_text("")
            streams = asyncio.run(streams_of(cluster.target, inject))
            report(f"{name_of_way}, {name}", began, streams, cluster)
            assert [stream.token_ids for stream in streams] == right, name


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("network", "num_tokens"),
    [({"loss": 0.01}, NUM_TOKENS), ({"delay_s": 0.05}, NUM_TOKENS // 8)],  # a step takes seconds with the delay
    ids=["1 % loss", "50 ms delay"],
)
@pytest.mark.parametrize("name_of_way", FAULTY)
def test_a_bad_network_changes_no_token(tmp_path, expected, name_of_way, network, num_tokens):
    way = WAYS[name_of_way]
    with cluster_of(tmp_path, way, **network) as cluster:
        began = time.monotonic()
        streams = asyncio.run(streams_of(cluster.target, num_tokens=num_tokens))
        report(f"{name_of_way}, {network}", began, streams, cluster)
        assert [stream.token_ids for stream in streams] == [token_ids[:num_tokens] for token_ids in expected(way)]
        assert "is lost" not in cluster.leader_log.read_text()
