"""A service with the contract, and a client from the contract's own protos."""

import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from penstock.service.config.contracts import CONTRACTS

if CONTRACTS["openengine"].is_installed:  # otherwise the tests are skipped
    from openengine.v1 import generation_pb2 as oe
    from openengine.v1.openengine_pb2_grpc import ControlStub, InferenceStub

KEYS = {"acme": "a" * 40, "zenith": "z" * 40, "operators": "o" * 40}


@dataclass
class Output:
    """The result of one call of Generate, which obeys the contract's order of events."""

    prompt: Any = None
    tokens: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finished: dict[int, Any] = field(default_factory=dict)
    error: Any = None
    usage: Any = None
    num_messages: int = 0

    async def read(self, call: Any) -> "Output":
        """Reads the call to its end; raises grpc.aio.AioRpcError."""
        while (message := await call.read()) is not grpc.aio.EOF:
            self.num_messages += 1
            assert self.usage is None, "the usage is on the last message"
            assert self.error is None, "an error is the last event"
            self._take(message)
            if message.HasField("usage"):
                self.usage = message.usage
        return self

    def _take(self, message: Any) -> None:
        match message.WhichOneof("event"):
            case "prompt":
                assert self.prompt is None
                assert not self.tokens
                self.prompt = message.prompt
            case "token":
                assert message.token.HasField("output_index")
                assert message.token.output_index not in self.finished
                self.tokens[message.token.output_index] += message.token.tokens
                self.texts[message.token.output_index] += message.token.text
            case "finished":
                assert message.finished.HasField("output_index")
                assert message.finished.output_index not in self.finished
                self.finished[message.finished.output_index] = message.finished
            case "error":
                self.error = message.error

    def token_ids(self, index: int = 0) -> list[int]:
        return [info.token_id for info in self.tokens[index]]


class Engine:
    """The contract of one service."""

    def __init__(self, service: Any, metadata: Any) -> None:
        self.service = service
        self.inference = InferenceStub(service.channel)
        self.control = ControlStub(service.channel)
        self._metadata = metadata

    def generate(self, prompt: list[int] | str, metadata: Any = (), **fields: Any) -> Any:
        """Begins a call of Generate."""
        request = oe.GenerateRequest(**{"request_id": "r", **fields})
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self.inference.Generate(request, metadata=(*self._metadata, *metadata))

    async def output(self, *arguments: Any, **fields: Any) -> Output:
        return await Output().read(self.generate(*arguments, **fields))


@pytest.fixture
def start_engine(start_service: Any) -> Callable[..., Awaitable[Engine]]:
    """Starts services with the contract."""

    async def start(executor: Any = None, metadata: Any = (), **config: Any) -> Engine:
        return Engine(await start_service(executor, **{"contracts": ("openengine",)} | config), metadata)

    return start


@pytest.fixture
def new_output() -> type[Output]:
    return Output


@pytest.fixture
def keys(tmp_path, load_keys):
    """The keys of three tenants; that of operators may administer."""
    path = tmp_path / "keys"
    rights = {"operators": " admin"}
    lines = (
        f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {tenant}{rights.get(tenant, '')}\n"
        for tenant, key in KEYS.items()
    )
    path.write_text("".join(lines))
    return load_keys(path)


@pytest.fixture
def metadata_of():
    """The metadata of a tenant's calls."""
    return lambda tenant: (("authorization", f"Bearer {KEYS[tenant]}"),)
