"""The runner of llama-server, against a server that sends what llama.cpp or ik_llama.cpp would."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cpu_bench.runners import llama_server
from cpu_bench.wire import Work

VOCABULARY = {"ab": 7, "cd": 8}


@asynccontextmanager
async def serving(messages: Sequence[dict[str, Any]], requests: list[dict[str, Any]]) -> AsyncIterator[int]:
    """The port of a server that answers every request with these messages."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        requests.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for message in messages:
            writer.write(f"data: {json.dumps(message)}\n\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(20):
        yield server.sockets[0].getsockname()[1]


LLAMA = [{"content": "ab", "tokens": [7], "stop": False}, {"content": "abcd", "tokens": [7, 8], "stop": False}]
IK = [{"content": text, "stop": False} for text in ("ab", "ab", "cd")]
LAST = {"content": "", "stop": True, "tokens_predicted": 3}


@pytest.mark.parametrize("messages", [[*LLAMA, {**LAST, "tokens": []}], [*IK, LAST]])
async def test_the_history_has_the_tokens_of_the_output(messages: list[dict[str, Any]]) -> None:
    requests: list[dict[str, Any]] = []
    async with serving(messages, requests) as port:
        ran = await llama_server._run(port, Work([([1, 2], 3), ([4], 3)], turns=2), VOCABULARY)
    assert [request["prompt"] for request in requests] == [[1, 2], [1, 2, 7, 7, 8, 4]]
    assert [sum(tokens for _, tokens in events) for events in ran.events] == [3, 3]


async def test_tokens_that_were_not_streamed_are_counted() -> None:
    async with serving([IK[0], {**LAST, "tokens_predicted": 4}], []) as port:
        ran = await llama_server._run(port, Work([([1], 4)]), VOCABULARY)
    assert [tokens for _, tokens in ran.events[0]] == [1, 3]


async def test_a_refusal_is_no_result() -> None:
    async with serving([{"error": {"message": "the slot is too short"}}], []) as port:
        with pytest.raises(RuntimeError, match="the slot is too short"):
            await llama_server._run(port, Work([([1], 4)]), VOCABULARY)
