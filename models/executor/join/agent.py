"""The agent of a host: joins the leader, runs the ranks of this host on the leader's word, and joins again when the
leader is lost. It outlives its ranks' processes."""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.models.errors import ModelError
from penstock.models.executor.join.hosted_rank import HostedRank
from penstock.models.executor.join.link import LINGER_S, MAX_UNPROVEN_BYTES, JoinLink, LinkLost, printable, tune
from penstock.models.executor.join.listener import tls_problem
from penstock.models.executor.join.refusal import JoinRefused
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
from penstock.models.executor.rank import share_of_host
from penstock.models.executor.wire import FrameKind, WireError, encode_frame
from penstock.scheduler.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 5.0
"""The delays between attempts to join: doubled after each, up to the second."""
REPEAT_S = 30.0
"""The same reason for another attempt is logged once in this time."""


class HostModel(Protocol):
    """The model's files on this host."""

    @property
    def digest(self) -> Sequence[bytes]:
        """The digests of the config, the weights and the tokenizer."""

    def configure(self, config: WorkerConfig) -> WorkerConfig:
        """Returns the config with this host's paths, threads and memory."""


@dataclass(frozen=True)
class AgentSettings:
    """How an agent joins."""

    host: str
    port: int
    version: str
    node_rank: int = -1
    """-1: any."""
    token: bytes | None = None
    tls: ssl.SSLContext | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Flags that must be the leader's too."""
    num_threads: int = 0
    num_gpus: int = 0
    memory_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HostAgent:
    """Joins a leader, again and again, until a refusal is final."""

    def __init__(self, settings: AgentSettings, find_model: Callable[[LeaderModel], HostModel]) -> None:
        """``find_model`` may be slow, and runs in a thread; it raises ModelError."""
        self._settings = settings
        self._find_model = find_model
        self._identity = secrets.token_hex(16)
        self._models: dict[LeaderModel, HostModel] = {}
        self._said: tuple[str, float] = ("", 0.0)

    async def run(self) -> None:
        """Runs until it is cancelled; then its ranks end at once. Raises JoinRefused if trying again cannot help."""
        delay = FIRST_DELAY_S
        while True:
            try:
                link, welcome = await self._join()
                delay = FIRST_DELAY_S
                await self._serve(link, welcome)
            except JoinRefused as refusal:
                if refusal.is_final:
                    raise
                problem = str(refusal)
            except (LinkLost, WireError) as error:
                problem = f"the leader {self._settings} is lost: {error}"
            except TimeoutError:
                problem = f"the leader {self._settings} does not answer within {CONNECT_S:.0f} s"
            except OSError as error:
                problem = f"the leader {self._settings} cannot be reached: {error.strerror or error}"
            self._log(problem)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, MAX_DELAY_S)

    def _log(self, problem: str) -> None:
        text, said_at = self._said
        now = time.monotonic()
        if problem != text or now - said_at > REPEAT_S:
            self._said = problem, now
            logger.warning("%s; trying again", problem)

    async def _join(self) -> tuple[JoinLink, JoinWelcome]:
        """Connects and shows that it may join. Raises JoinRefused, LinkLost, WireError and OSError."""
        settings = self._settings
        async with asyncio.timeout(CONNECT_S) as patience:
            try:
                reader, writer = await asyncio.open_connection(settings.host, settings.port, ssl=settings.tls)
            except ssl.SSLError as error:
                raise self._no_tls(error) from error
            tune(writer.get_extra_info("socket"))
            link = JoinLink(reader, writer)
            try:
                welcome = await self._greet(link)
            except LinkLost as error:
                link.drop("it did not welcome this agent")
                if isinstance(error.__cause__, ssl.SSLError):
                    raise self._no_tls(error.__cause__) from error
                if (
                    settings.tls is not None
                ):  # in TLS 1.3, the leader checks this host's certificate after the handshake
                    hint = "perhaps it refuses the certificate of --join-tls-cert; its log has the reason"
                    raise LinkLost(f"it ended the TLS connection before it answered: {hint}") from error
                raise
            except BaseException:
                link.drop("it did not welcome this agent")
                raise
            patience.reschedule(None)
        return link, welcome

    def _no_tls(self, error: ssl.SSLError) -> JoinRefused:
        hint = "check --join-tls-ca, -cert and -key on both hosts, and that the leader's certificate has this name"
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            hint = "the leader does not use TLS: give --join-tls-ca, -cert and -key to both or to neither"
        return JoinRefused(f"the leader {self._settings}: no TLS connection: {tls_problem(error)}; {hint}")

    def _refused(self, reason: str, *, is_final: bool = True) -> JoinRefused:
        return JoinRefused(f"the leader {self._settings} refused: {printable(reason, 500)}", is_final=is_final)

    async def _greet(self, link: JoinLink) -> JoinWelcome:
        settings, token = self._settings, self._settings.token
        hello = AgentHello(
            version=settings.version,
            identity=self._identity,
            nonce=secrets.token_bytes(NONCE_BYTES),
            node_rank=settings.node_rank,
            settings=dict(settings.settings),
            host_name=socket.gethostname()[:64],
            num_threads=settings.num_threads,
            num_gpus=settings.num_gpus,
            memory_bytes=settings.memory_bytes,
        )
        link.send_preamble()
        frame = encode_frame(FrameKind.HELLO, hello)
        link.send_frame(frame)
        challenge = await self._next(link, FrameKind.CHALLENGE)
        assert isinstance(challenge, JoinChallenge), "declared so"
        nonce, is_leader = challenge.nonce, token is None and not challenge.proof
        if token is not None:
            is_leader = is_proven(token, LEADER, frame, nonce, challenge.proof)
        own_proof = prove(token, AGENT, frame, nonce) if token is not None and is_leader else b""
        link.send(FrameKind.PROOF, JoinProof(own_proof, has_token=token is not None))
        if not is_leader:
            # It may be a stranger, so its own reason does not count. It has to read the last frame first.
            with contextlib.suppress(TimeoutError, LinkLost, WireError):
                async with asyncio.timeout(LINGER_S):
                    await link.expect(FrameKind.REFUSED, limit=MAX_UNPROVEN_BYTES)
            raise self._refused(_token_problem(token, challenge))
        welcome = await self._next(link, FrameKind.WELCOME)
        assert isinstance(welcome, JoinWelcome), "declared so"
        return welcome

    async def _next(self, link: JoinLink, kind: FrameKind) -> object:
        """Returns the body of the next frame, which must be of this kind. Raises JoinRefused if the leader refuses."""
        found, body = await link.expect(kind, FrameKind.REFUSED, limit=MAX_UNPROVEN_BYTES)
        if isinstance(body, JoinRefusal):
            raise self._refused(body.reason, is_final=body.is_final)
        assert found is kind, "``expect`` allows no other"
        return body

    async def _serve(self, link: JoinLink, welcome: JoinWelcome) -> None:
        """Runs ranks until the leader is lost. Raises JoinRefused, LinkLost and WireError."""
        ranks: dict[int, HostedRank] = {}
        ended: list[HostedRank] = []
        logger.info("joined %s as node rank %d of %d", self._settings, welcome.node_rank, welcome.num_nodes)
        link.start_beating()
        reading = asyncio.create_task(self._report_model(link, welcome.model))
        try:
            rank = -1
            while True:
                kind, body = await link.receive(undecoded=(FrameKind.PLAN,))
                match kind:
                    case FrameKind.ALIVE:
                        pass
                    case FrameKind.RANK:
                        rank = body
                    case FrameKind.REFUSED:
                        assert isinstance(body, JoinRefusal), "declared so"
                        raise self._refused(body.reason, is_final=body.is_final)
                    case FrameKind.CONFIG if rank not in ranks:
                        config = self._configured(welcome, link, rank, body)
                        ranks[rank] = HostedRank(link, rank, config)
                    case FrameKind.STOP if rank in ranks:
                        ended = [*(each for each in ended if each.is_ending), ranks.pop(rank)]
                        ended[-1].end()
                    case FrameKind.PLAN | FrameKind.KILL if rank in ranks:
                        ranks[rank].take(kind, body)
                    case _:
                        raise WireError(f"got a {kind.name} frame about rank {rank}")
        finally:
            link.drop("the agent ends")
            reading.cancel()
            await asyncio.gather(*(hosted.abort() for hosted in (*ranks.values(), *ended)))

    async def _report_model(self, link: JoinLink, served: LeaderModel) -> None:
        """Reads the model's files, unless it has read them, and reports their digests."""
        if served not in self._models:
            logger.info("reading the files of %s", served.name)
            try:
                self._models[served] = await _in_daemon(lambda: self._find_model(served))
            except (ModelError, OSError) as error:
                link.send(FrameKind.MODEL, ModelReport(problem=printable(str(error), 1000)))
                return
        config, weights, tokenizer = self._models[served].digest
        link.send(FrameKind.MODEL, ModelReport(config, weights, tokenizer))

    def _configured(self, welcome: JoinWelcome, link: JoinLink, rank: int, config: object) -> WorkerConfig:
        """Returns the config of a rank with what this host decides. Raises WireError if the rank is another host's."""
        index = rank - welcome.node_rank * welcome.ranks_per_node
        model = self._models.get(welcome.model)
        if not isinstance(config, WorkerConfig) or not 0 <= index < welcome.ranks_per_node or model is None:
            raise WireError(f"got a config for rank {rank}")
        meeting = msgspec.structs.replace(config.meeting, host=link.remote_host)
        config = msgspec.structs.replace(config, meeting=meeting)
        return share_of_host(model.configure(config), index, welcome.ranks_per_node)


async def _in_daemon(find: Callable[[], HostModel]) -> HostModel:
    """Runs a function in a thread that does not keep the process alive: a download may take long."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[HostModel] = loop.create_future()

    def settle(model: HostModel | Exception) -> None:
        if found.done():  # the waiter was cancelled
            return
        if isinstance(model, Exception):
            found.set_exception(model)
        else:
            found.set_result(model)

    def run() -> None:
        model: HostModel | Exception
        try:
            model = find()
        except Exception as error:
            model = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, model)

    threading.Thread(target=run, name="model files", daemon=True).start()
    return await found


def _token_problem(token: bytes | None, challenge: JoinChallenge) -> str:
    if token is None:
        return "the agent has no token, and the leader has one: give --join-token-file to both or to neither"
    if not challenge.proof:
        return "the agent has a token, and the leader has none: give --join-token-file to both or to neither"
    return "wrong token: --join-token-file must have the same content on both hosts"
