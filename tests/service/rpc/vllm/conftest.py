"""A service with the contract, and a caller that acts as a gateway."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from penstock.service.rpc.foreign.contracts import ModelFiles


@dataclass
class Output:
    """The result of one call of Generate."""

    chunks: list[vllm.GenerateStreamChunk] = field(default_factory=list)
    completes: list[vllm.GenerateComplete] = field(default_factory=list)

    async def read(self, call: Any) -> "Output":
        """Reads the call to its end; raises grpc.aio.AioRpcError."""
        while (message := await call.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("response")
            assert kind is not None
            if kind == "complete":
                self.completes.append(message.complete)
            else:
                assert message.chunk.index not in {complete.index for complete in self.completes}
                self.chunks.append(message.chunk)
        return self

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for chunk in self.chunks if chunk.index == index for token_id in chunk.token_ids]


class Engine:
    """The contract of one service."""

    def __init__(self, service: Any, metadata: Any = ()) -> None:
        self.service = service
        self.stub = VllmEngineStub(service.channel)
        self._metadata = metadata

    def generate(self, prompt: list[int] | str, stream: bool = True, request_id: str = "r", **params: Any) -> Any:
        """Begins a call of Generate."""
        request = vllm.GenerateRequest(
            request_id=request_id, stream=stream, sampling_params=vllm.SamplingParams(**params)
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt)
        return self.stub.Generate(request, metadata=self._metadata)

    async def output(self, *arguments: Any, **params: Any) -> Output:
        return await Output().read(self.generate(*arguments, **params))


@pytest.fixture
def start_engine(start_service: Any, byte_tokenizer_path: Path) -> Callable[..., Awaitable[Engine]]:
    """Starts services with the contract."""

    async def start(executor: Any = None, metadata: Any = (), **config: Any) -> Engine:
        files = ModelFiles(byte_tokenizer_path, byte_tokenizer_path)
        config = {"contracts": ("vllm",), "model_files": files} | config
        return Engine(await start_service(executor, **config), metadata)

    return start


@pytest.fixture
def new_output() -> type[Output]:
    return Output
