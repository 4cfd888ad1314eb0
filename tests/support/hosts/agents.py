"""A leader, and agents that join it: in this process, and as processes whose ranks have no model."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.models.executor import spawn
from penstock.models.executor.join.agent import AgentSettings, HostAgent
from penstock.models.executor.join.leader import Leader, LeaderSettings
from penstock.models.executor.join.refusal import JoinRefused
from penstock.models.executor.join_messages import LeaderModel
from penstock.scheduler.worker_config import WorkerConfig

TOKEN = bytes(range(32))
DIGEST = (b"config", b"weights", b"tokenizer")
VERSION = "1.2.3"


class FilesAlike:
    """A host's model with the same files as the leader's."""

    digest: tuple[bytes, ...] = DIGEST

    def configure(self, config: WorkerConfig) -> WorkerConfig:
        return config


def leader_settings(**changes: Any) -> LeaderSettings:
    """One for two hosts with a rank each, on a free port of this machine."""
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "num_nodes": 2,
        "ranks_per_node": 1,
        "version": VERSION,
        "model": LeaderModel("none"),
        "digest": DIGEST,
        "token": TOKEN,
    }
    return LeaderSettings(**{**values, **changes})


def agent_settings(port: int, **changes: Any) -> AgentSettings:
    """Those that such a leader accepts."""
    values: dict[str, Any] = {"host": "127.0.0.1", "version": VERSION, "token": TOKEN}
    return AgentSettings(port=port, **{**values, **changes})


def new_agent(port: int, model: Any = None, **changes: Any) -> HostAgent:
    found = FilesAlike() if model is None else model
    return HostAgent(agent_settings(port, **changes), lambda served: found)


@asynccontextmanager
async def leading(**settings: Any) -> AsyncIterator[Leader]:
    """A leader that listens."""
    leader = Leader(leader_settings(**settings))
    await leader.open()
    try:
        yield leader
    finally:
        await leader.close()


@asynccontextmanager
async def joining(agent: HostAgent) -> AsyncIterator["asyncio.Task[None]"]:
    """An agent that runs."""
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, JoinRefused):
            await task


AGENT = """
import asyncio, sys
from hosts.agents import new_agent
from penstock.models.executor import spawn
from penstock.models.executor.join import link

port, silence, spawn.WORKER = sys.argv[1:]
link.MAX_SILENCE_S = float(silence)
asyncio.run(new_agent(int(port)).run())
"""


@contextmanager
def agent_process(port: int, silence_s: float) -> Iterator["subprocess.Popen[bytes]"]:
    """An agent as a process, whose ranks run what ``spawn.WORKER`` is here. Another side that is silent for
    ``silence_s`` is lost for it."""
    paths = [path for path in sys.path if path.endswith("tests/support")]
    code = f"import sys; sys.path += {paths!r}\n{AGENT}"
    command = [sys.executable, "-P", "-c", code, str(port), str(silence_s), spawn.WORKER]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def worker_command(leader: str, token: Path, log: Path, *flags: str, prefix: tuple[str, ...] = ()) -> Iterator[Any]:
    """``penstock worker`` as a process that joins ``leader`` and logs to a file; ``prefix`` is a command that runs
    it."""
    penstock = Path(sys.executable).with_name("penstock")
    command = [*prefix, str(penstock), "worker", "--join", leader, "--join-token-file", str(token), *flags]
    with log.open("ab") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()
