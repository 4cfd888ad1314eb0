"""The leader's side of the join: accepts the agents of the other hosts, gives each its place, and reports what is
missing."""

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address

from penstock.models.executor.join.link import MAX_UNPROVEN_BYTES, PREAMBLE, JoinLink, LinkLost, printable
from penstock.models.executor.join.listener import JoinListener, tls_problem
from penstock.models.executor.join.refusal import JoinRefused
from penstock.models.executor.join.remote_worker import JoinedNode, RemoteWorker
from penstock.models.executor.join.token import AGENT, LEADER, is_proven, prove
from penstock.models.executor.join_messages import (
    NONCE_BYTES,
    AgentHello,
    JoinChallenge,
    JoinProof,
    JoinRefusal,
    JoinWelcome,
    LeaderModel,
    ModelReport,
)
from penstock.models.executor.wire import HEADER, FrameKind, WireError, decode_body
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""How long a connection has to show that it may join."""
LOG_INTERVAL_S = 10.0
REPEAT_S = 60.0
"""The same refusal of the same address is logged once in this time."""
MAX_REFUSALS = 32
"""The number of refusals that are remembered."""
MAX_SHOWN = 4
"""How many of them a line shows."""


@dataclass(frozen=True)
class LeaderSettings:
    """What a leader checks, and how it is reached."""

    host: str
    port: int
    num_nodes: int
    ranks_per_node: int
    version: str
    model: LeaderModel
    digest: Sequence[bytes]
    """The digests of the model's config, weights and tokenizer."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Flags that an agent must have too, if it has any."""
    token: bytes | None = None
    tls: ssl.SSLContext | None = None
    allowed: Sequence[IPv4Network | IPv6Network] = ()
    """The addresses from which agents may join; empty: all."""
    timeout_s: float = 600.0
    """How long ``gather`` waits."""


class Leader:
    """The ``OtherHosts`` of a service. All methods must be called on the event loop's thread."""

    def __init__(self, settings: LeaderSettings) -> None:
        self._settings = settings
        self.num_nodes = settings.num_nodes
        self.nodes = [JoinedNode(number) for number in range(1, settings.num_nodes)]
        self.port = settings.port
        self._listener = JoinListener(settings.tls, self._serve)
        self._changed = asyncio.Event()
        self._refusals: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Address and reason, and when it was logged; the newest last."""

    async def open(self) -> None:
        """Listens. Raises OSError."""
        self.port = await self._listener.open(self._settings.host, self._settings.port)

    async def close(self) -> None:
        """Ends the listener and all connections. Safe to call twice."""
        await self._listener.close()

    def worker(self, config: WorkerConfig, rank: int) -> RemoteWorker:
        return RemoteWorker(self.nodes[rank // self._settings.ranks_per_node - 1], config, rank)

    async def gather(self) -> str:
        """See ``OtherHosts``. Logs what is missing at once, and every ten seconds."""
        began = time.monotonic()
        while missing := self._missing():
            left = self._settings.timeout_s - (time.monotonic() - began)
            if left <= 0:
                raise ExecutorError(
                    f"--nnodes {self.num_nodes}: not all hosts joined within {self._settings.timeout_s:g} s "
                    f"(--join-timeout): {missing}"
                )
            logger.info("waiting for other hosts: %s", missing)
            await self._wait_for_change(min(LOG_INTERVAL_S, left))
        return next(node.link.local_host for node in self.nodes if node.link is not None)

    async def _wait_for_change(self, timeout_s: float) -> None:
        """Waits until all nodes are ready, or for this time."""
        end = time.monotonic() + timeout_s
        while not all(node.is_ready for node in self.nodes):
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _missing(self) -> str:
        """Describes the nodes that are not ready, and what was refused; empty if all are ready."""
        waiting = [f"{node}: {node.problem}" for node in self.nodes if not node.is_ready]
        if not waiting:
            self._refusals.clear()
            return ""
        others = [(host, reason) for host, reason in self._refusals if not any(reason in line for line in waiting)]
        return "; ".join([*waiting, *(f"refused {host}: {reason}" for host, reason in others[-MAX_SHOWN:])])

    async def _serve(self, connection: socket.socket, host: str) -> None:
        """Serves one connection until it ends. A fault is logged, and ends only this connection."""
        link = None
        try:
            async with asyncio.timeout(HANDSHAKE_S) as patience:
                link, refusal = await self._listener.open_link(connection)
                if refusal is not None:
                    raise refusal
                hello = await self._authenticate(link)
                patience.reschedule(None)
            self._listener.trust()
            await self._serve_agent(link, hello)
        except JoinRefused as refusal:
            self._note_refusal(host, str(refusal))
            if link is not None:
                await link.end_after(FrameKind.REFUSED, JoinRefusal(str(refusal), refusal.is_final))
        except TimeoutError:
            self._note_refusal(host, f"it did not show within {HANDSHAKE_S:.0f} s that it may join")
        except WireError:
            self._note_refusal(host, "it sent something else than the frames of a join")
        except LinkLost as error:
            self._note_refusal(host, str(error))
        except OSError as error:
            kind = "connection" if self._settings.tls is None else "TLS connection"
            self._note_refusal(host, f"no {kind}: {tls_problem(error)}")
        finally:
            if link is not None:
                link.drop("this connection is over")

    def _is_allowed(self, host: str) -> bool:
        allowed = self._settings.allowed
        try:
            return not allowed or any(ip_address(host) in network for network in allowed)
        except ValueError:  # it has closed the connection, which then has no address
            return False

    async def _authenticate(self, link: JoinLink) -> AgentHello:
        """Returns an agent's first message, once it has shown that it may join. Raises JoinRefused."""
        if not self._is_allowed(link.remote_host):
            problem = f"the address {link.remote_host} is not in the leader's --join-allow"
            raise JoinRefused(problem, is_final=False)
        preamble = await link.receive_preamble()
        if preamble != PREAMBLE:
            is_ours = preamble.startswith(PREAMBLE.partition(b"/")[0])
            raise JoinRefused(
                "other version: the agent's penstock joins in another way"
                if is_ours
                else "it is not an agent of penstock"
            )
        kind, frame = await link.receive(MAX_UNPROVEN_BYTES, undecoded=(FrameKind.HELLO,))
        if kind is not FrameKind.HELLO:
            raise WireError(f"got a {kind.name} frame first")
        hello = decode_body(kind, frame[HEADER.size :])
        assert isinstance(hello, AgentHello), "declared so"
        token, nonce = self._settings.token, secrets.token_bytes(NONCE_BYTES)
        own_proof = b"" if token is None else prove(token, LEADER, frame, nonce)
        link.send(FrameKind.CHALLENGE, JoinChallenge(nonce, own_proof))
        _, shown = await link.expect(FrameKind.PROOF, limit=MAX_UNPROVEN_BYTES)
        assert isinstance(shown, JoinProof), "declared so"
        if token is None and shown.has_token:
            raise JoinRefused(
                "the agent has a token, and the leader has none: give --join-token-file to both or to neither"
            )
        if token is not None and not shown.has_token:
            raise JoinRefused(
                "the agent has no token, and the leader has one: give --join-token-file to both or to neither"
            )
        if token is not None and not is_proven(token, AGENT, frame, nonce, shown.proof):
            raise JoinRefused("wrong token: --join-token-file must have the same content on both hosts")
        return hello

    async def _serve_agent(self, link: JoinLink, hello: AgentHello) -> None:
        """Gives an agent its place, checks its model, and receives what its ranks send. Raises JoinRefused."""
        self._check_hello(hello)
        node = self._place(link, hello)
        node.identity, node.address, node.link = hello.identity, link.remote_host, link
        node.is_ready, node.problem = False, "it has joined, and reads the model's files"
        settings = self._settings
        try:
            welcome = JoinWelcome(node.number, self.num_nodes, settings.ranks_per_node, settings.model)
            link.send(FrameKind.WELCOME, welcome)
            link.start_beating()
            _, report = await link.expect(FrameKind.MODEL, limit=MAX_UNPROVEN_BYTES)
            assert isinstance(report, ModelReport), "declared so"
            self._check_model(report)
            node.is_ready, node.problem = True, ""
            logger.info(
                "%s has joined: %s, %d threads, %d GPUs, %.1f GiB of memory", node, printable(hello.host_name, 64),
                hello.num_threads, hello.num_gpus, hello.memory_bytes / (1 << 30),
            )  # fmt: skip
            self._changed.set()
            await self._receive(node, link)
        except JoinRefused as refusal:
            self._lose(node, link, f"refused: {refusal}")
            raise
        except (LinkLost, WireError) as error:
            if node.link is link:
                logger.warning("%s: its agent is lost: %s", node, error)
            self._lose(node, link, str(error))
        finally:
            self._lose(node, link, "this leader ends")

    def _lose(self, node: JoinedNode, link: JoinLink, why: str) -> None:
        if node.link is link:
            node.lose(why)
            self._changed.set()

    def _check_hello(self, hello: AgentHello) -> None:
        settings = self._settings
        if hello.version != settings.version:
            raise JoinRefused(
                f"other version: the agent has penstock {printable(hello.version, 32)}, and the leader "
                f"{settings.version}"
            )
        for flag, value in hello.settings.items():
            if settings.settings.get(flag) != value:
                raise JoinRefused(
                    f"other configuration: {printable(flag, 64)} is {printable(value, 64)} on the agent's host, and "
                    f"{settings.settings.get(flag, 'unknown')} on the leader"
                )
        if hello.node_rank >= self.num_nodes or hello.node_rank == 0 or hello.node_rank < -1:
            raise JoinRefused(f"--node-rank {hello.node_rank}: must be 1 to {self.num_nodes - 1}; 0 is the leader")

    def _place(self, link: JoinLink, hello: AgentHello) -> JoinedNode:
        """Chooses an agent's place: its own, that of which it has the number, or a free one. Raises JoinRefused."""
        others = {node.link.local_host for node in self.nodes if node.link and node.identity != hello.identity}
        if others and link.local_host not in others:
            raise JoinRefused(
                f"the agent joined at the leader's address {link.local_host}, and others at {', '.join(others)}: ranks "
                "meet at one address, so join all at the same one",
                is_final=False,
            )
        own = next((node for node in self.nodes if node.identity == hello.identity), None)
        if hello.node_rank > 0:
            own = self.nodes[hello.node_rank - 1]
            if own.link is not None and own.identity != hello.identity:
                raise JoinRefused(f"--node-rank {own.number} is taken by {own.address}", is_final=False)
        if own is not None and (old := own.link) is not None:
            logger.warning("%s: its agent has joined again", own)
            self._lose(own, old, "it has joined again")
            old.drop("the same agent has joined again")
        if own is None:
            free = sorted((node for node in self.nodes if node.link is None), key=lambda node: bool(node.identity))
            if not free:
                raise JoinRefused(f"no free rank: all {self.num_nodes} hosts have joined", is_final=False)
            own = free[0]
        return own

    def _check_model(self, report: ModelReport) -> None:
        if report.problem:
            raise JoinRefused(f"the agent cannot use the model: {printable(report.problem, 500)}")
        digests = (report.config, report.weights, report.tokenizer)
        names = ("config.json", "weights", "tokenizer")
        other = [name for name, own, theirs in zip(names, self._settings.digest, digests, strict=True) if own != theirs]
        if other:
            raise JoinRefused(
                f"other weights: the model's {' and '.join(other)} on the agent's host and on the leader's differ"
            )

    async def _receive(self, node: JoinedNode, link: JoinLink) -> None:
        """Passes frames on to the ranks' runs until the connection ends. Raises LinkLost and WireError."""
        rank = -1
        while True:
            kind, body = await link.receive()
            if kind is FrameKind.RANK:
                rank = body
            elif kind is not FrameKind.ALIVE and (run := node.runs.get(rank)) is not None:
                run.take(node, kind, body)

    def _note_refusal(self, host: str, reason: str) -> None:
        """Remembers a refusal for ``gather``, and logs it unless the same was logged a short time ago."""
        key, now = (host, printable(reason, 500)), time.monotonic()
        logged_at = self._refusals.pop(key, None)
        self._refusals[key] = now if logged_at is None or now - logged_at > REPEAT_S else logged_at
        if self._refusals[key] == now:
            logger.warning("refused a host that tried to join: %s: %s", *key)
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
