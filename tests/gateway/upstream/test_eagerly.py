"""Coroutines that are begun in one place and go on in another."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.clients.gateway.upstream.eagerly import rest_of


async def begun(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await rest_of(coroutine, coroutine.send(None))


async def test_the_rest_has_the_result():
    async def work():
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return 5

    assert await begun(work()) == 5


async def test_the_rest_raises():
    async def work():
        await asyncio.sleep(0)
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        await begun(work())


@pytest.mark.parametrize("cleans_up", [False, True])
async def test_a_cancellation_reaches_what_waits(cleans_up):
    seen: list[str] = []

    async def work():
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if cleans_up:
                await asyncio.sleep(0)
            seen.append("cancelled")
            raise

    task = asyncio.create_task(begun(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]
    assert task.cancelled()
