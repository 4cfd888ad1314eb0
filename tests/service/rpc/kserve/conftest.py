"""A service with the contract, called by tritonclient or with messages of the test's own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import tritonclient.grpc.aio
from wire.inference_calls import Inference


@pytest.fixture
def start_inference(start_service: Any) -> Callable[..., Awaitable[Inference]]:
    """Starts services with the contract."""

    async def start(executor: Any = None, metadata: Any = (), **config: Any) -> Inference:
        return Inference(await start_service(executor, **({"contracts": ("kserve",)} | config)), metadata)

    return start


@pytest.fixture
async def inference(start_inference: Any) -> Inference:
    """One whose worker answers at once."""
    inference: Inference = await start_inference()
    return inference


@pytest.fixture
async def triton(inference: Inference) -> AsyncIterator[Any]:
    """tritonclient's client with coroutines."""
    async with tritonclient.grpc.aio.InferenceServerClient(inference.target) as client:
        yield client
