"""Envoy's configuration: a real Envoy accepts it, and treats streams, replicas and refusals as docs/docker.md says."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import waiting
from fake_service import NOT_SERVING, FakeService
from monitoring.prometheus_server import until
from proxies.envoy import CONFIG, check_often, running_envoy
from serve_process import serving, target_of

from penstock.clients import AsyncClient, Delta, PenstockError
from penstock.clients.chat_messages import ChatMessage

Find = Callable[[str], str]


@pytest.fixture
def envoy(find_program: Find) -> str:
    return find_program("envoy")


def test_envoy_accepts_the_configuration(envoy: str) -> None:
    command = [envoy, "--mode", "validate", "--config-path", str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_stream_arrives_token_by_token_and_can_be_cancelled(envoy: str, tmp_path: Path) -> None:
    async with (
        FakeService().serving() as fake,
        running_envoy(envoy, tmp_path, fake.target) as proxy,
        AsyncClient(proxy.target) as client,
    ):
        async with client.generate("endless") as request:
            async for event in request:
                if isinstance(event, Delta):
                    break
            assert fake.cancelled == []
        await waiting.until(lambda: fake.cancelled)


async def test_a_replica_that_is_not_serving_gets_no_calls(envoy: str, tmp_path: Path) -> None:
    draining = FakeService()
    draining.health = NOT_SERVING
    async with (
        draining.serving(),
        FakeService().serving() as ready,
        running_envoy(envoy, tmp_path, draining.target, ready.target, change=check_often) as proxy,
    ):
        assert await asyncio.to_thread(proxy.healthy) == {ready.target}
        for _ in range(8):
            async with AsyncClient(proxy.target) as client:
                assert (await client.complete("hi")).text == "hi"
        assert (draining.streams, ready.streams) == (0, 8)
        ready.health = NOT_SERVING

        async def none_is_healthy() -> bool:
            return not await asyncio.to_thread(proxy.healthy)

        assert await until(none_is_healthy)
        async with AsyncClient(proxy.target) as client:
            with pytest.raises(PenstockError, match="no healthy upstream"):
                await client.model()
        assert (draining.streams, ready.streams) == (0, 8)


class Refusing(FakeService):
    """Refuses as a service does that drains, before a health check has noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    async def GetModel(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        self.refused += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")


async def test_another_replica_gets_what_one_refuses(envoy: str, tmp_path: Path) -> None:
    refusing = Refusing()
    async with (
        refusing.serving(),
        FakeService().serving() as ready,
        running_envoy(envoy, tmp_path, refusing.target, ready.target) as proxy,
        AsyncClient(proxy.target) as client,
    ):
        while refusing.refused < 3:
            assert (await client.model()).name == "fake"


@pytest.mark.soak
async def test_a_chat_with_the_demo_model_is_the_same_through_envoy(envoy: str, tmp_path: Path) -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "What is a kernel?"}]
    with serving("--port=0", "--admin-listen=off", "--kv-cache-memory-bytes=64M") as (_, greeting):
        async with running_envoy(envoy, tmp_path, target_of(greeting)) as proxy:
            texts = []
            for target in (target_of(greeting), proxy.target):
                async with AsyncClient(target) as client:
                    texts.append((await client.complete(messages, max_tokens=64, temperature=0)).text)
            assert texts[0] == texts[1] != ""
