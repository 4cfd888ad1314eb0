"""The load generator against servers with OpenAI's API: what is sent, and the kinds of streams that come back."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.openai_target import OpenAiCaller
from penstock.clients.bench.runner import run
from penstock.clients.bench.target import OK
from penstock.clients.bench.workload import ClosedLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.errors import PenstockError


class HttpServer:
    """Answers as ``style`` says: like vLLM, SGLang, llama.cpp, or wrong."""

    def __init__(self, style="vllm"):
        self.style = style
        self.bodies = []
        self.headers = {}
        self.open = self.broken_off = 0
        self.target = ""

    async def models(self, request):
        if self.style == "no models":
            return web.Response(text="<html>")
        return web.json_response({"data": [{"id": "m", "max_model_len": 500}, {"id": "other"}]})

    async def complete(self, request):
        body = await request.json()
        self.headers = dict(request.headers)
        self.bodies.append(body)
        if self.style == "busy":
            return web.json_response({"error": "too many"}, status=429, headers={"Retry-After": "2"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        try:
            for event in self._events(body):
                data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\r\n\r\n"
                await response.write(data[:9])  # an event may come in pieces
                await asyncio.sleep(0.001)
                await response.write(data[9:])
            if self.style == "hang":
                await asyncio.sleep(30)
            if self.style != "breaks off":
                await response.write(b": a comment\n\ndata: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.broken_off += 1
            raise
        finally:
            self.open -= 1
        return response

    def _events(self, body):
        chat, count = "messages" in body, body["max_tokens"]
        prompt = body.get("prompt") or [1] * 7
        if self.style == "wrong":
            yield b"{]"
        if self.style == "error":
            yield {"error": {"message": "the engine died"}}
            return
        for i in range(count):
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": None,
                **({"delta": {"content": "x"}} if chat else {"text": " x"}),
            }
            event: dict[str, Any] = {"id": "cmpl-1", "choices": [choice]}
            if self.style == "vllm":
                choice["token_ids"] = [i]
            if self.style == "sglang":  # usage so far in every event, and two tokens in each
                event["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": 2 * i + 2}
            yield event
            if self.style in ("hang", "breaks off"):
                return
        last = {} if self.style == "sglang" else {"text": ""}
        yield {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": "length", **last}]}
        total = count * {"sglang": 2, "llama.cpp": 3}.get(self.style, 1)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        yield {"id": "cmpl-1", "choices": [], "usage": usage}

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.target = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def load(num_requests=3, **known):
    shape = {"arrivals": ClosedLoop(2), "prompt_tokens": Uniform(7, 7), "output_tokens": Uniform(5, 5)}
    return RandomLoad(vocab_size=50, num_requests=num_requests, **{**shape, **known})


async def asked(style, **known):
    caller_options = {name: known.pop(name) for name in ("endpoint", "timeout_s") if name in known}
    async with HttpServer(style).serving() as server:
        async with OpenAiCaller(ConnectionOptions(server.target, api_key="k"), model="m", **caller_options) as caller:
            report = await run(load(**known), caller)
        return server, report


async def test_what_is_sent():
    server, report = await asked("vllm", options={"temperature": 0, "ignore_eos": True, "return_token_ids": None})
    assert [record.status for record in report.records] == [OK] * 3
    sent = [record.request.prompt_token_ids for record in report.records]
    assert sorted(body["prompt"] for body in server.bodies) == sorted(sent)
    body = server.bodies[0]
    assert {name: body[name] for name in ("model", "max_tokens", "stream", "temperature", "ignore_eos")} == {
        "model": "m",
        "max_tokens": 5,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    assert body["stream_options"]["include_usage"]
    assert "return_token_ids" not in body  # it was taken out
    assert server.headers["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("style", "num_tokens", "ids"), [("vllm", 5, [0, 1, 2, 3, 4]), ("sglang", 10, []), ("llama.cpp", 15, [])]
)
async def test_tokens_are_counted_as_the_server_reports_them(style, num_tokens, ids):
    _, report = await asked(style)
    for record in report.records:
        assert (record.status, record.error) == (OK, "")
        assert record.output_tokens == num_tokens
        assert record.token_ids == ids
        assert sum(record.message_tokens) == (5 if style == "llama.cpp" else num_tokens)
        assert (record.prompt_tokens, record.cached_tokens) == (7, 4)
        assert (record.finish_reason, record.request_id) == ("length", "cmpl-1")
        assert list(record.message_s) == sorted(record.message_s)
        assert record.sent_s < record.message_s[0] <= record.ended_s


async def test_turns_send_the_whole_context_again():
    server, report = await asked("vllm", turns=2, num_requests=2)
    first, second = (record.request.prompt_token_ids for record in report.records)
    assert server.bodies[1]["prompt"] == [*first, 0, 1, 2, 3, 4, *second]


async def test_chat_gets_words():
    server, _ = await asked("vllm", endpoint="/v1/chat/completions", turns=2, num_requests=2)
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.bodies[1]["messages"][1]["content"] == "xxxxx"
    words = server.bodies[0]["messages"][0]["content"].split()
    assert len(words) == 7
    assert server.bodies[1]["messages"][0] == server.bodies[0]["messages"][0]


@pytest.mark.parametrize(
    ("style", "status", "error"),
    [
        ("busy", "HTTP 429", "too many"),
        ("error", "ERROR", "the engine died"),
        ("wrong", "BAD_ANSWER", "not an event of a completion: {]"),
        ("breaks off", "UNAVAILABLE", "ended early"),
    ],
)
async def test_failures_are_reported(style, status, error):
    _, report = await asked(style, num_requests=1)
    (record,) = report.records
    assert record.status == status
    assert error in record.error
    assert record.ended_s >= record.sent_s
    assert record.retry_after_s == (2.0 if style == "busy" else None)


async def test_a_deadline_and_an_early_end_close_the_connection():
    server, report = await asked("hang", num_requests=1, timeout_s=0.05)
    assert report.records[0].status == "DEADLINE_EXCEEDED"
    assert report.records[0].output_tokens == 1
    assert (server.open, server.broken_off) == (0, 1)


async def test_the_servers_model():
    async with HttpServer().serving() as server:
        async with OpenAiCaller(ConnectionOptions(server.target)) as caller:
            assert await caller.model() == ("m", 500)
        async with OpenAiCaller(ConnectionOptions(server.target.removeprefix("http://")), model="other") as caller:
            assert await caller.model() == ("other", None)
        server.style = "no models"
        async with OpenAiCaller(ConnectionOptions(server.target), model="x") as caller:
            assert await caller.model() == ("x", None)
        async with OpenAiCaller(ConnectionOptions(server.target)) as caller:
            with pytest.raises(
                PenstockError, match=r"--model: required, since .*/v1/models lists none; .* 200: <html>"
            ):
                await caller.model()


async def test_no_server():
    async with OpenAiCaller(ConnectionOptions("127.0.0.1:1")) as caller:
        with pytest.raises(PenstockError, match=r"cannot reach the server http://127\.0\.0\.1:1"):
            await caller.model()
        report = await run(load(1), caller)
    assert report.failures == {"UNAVAILABLE": 1}


async def test_the_command(tool):
    async with HttpServer().serving() as server:
        arguments = (
            "--api",
            "openai",
            "--vocab-size",
            50,
            "--num-requests",
            5,
            "--prompt-tokens",
            9,
            "--output-tokens",
            4,
        )
        extra = (
            "--set",
            "temperature=0.5",
            "--set",
            "ignore_eos=",
            "--json",
            "-",
            "--model",
            "m",
            "--timeout-ms",
            20_000,
        )
        done = await asyncio.to_thread(lambda: tool.run("bench", server.target, *arguments, *extra))
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["api"], told["model"], told["summary"]["requests"]["ok"]) == ("openai", "m", 5)
        assert [request["token_ids"] for request in told["requests"]] == [[0, 1, 2, 3]] * 5
        assert len(server.bodies) == 9  # four of them to warm up
        assert all(body["temperature"] == 0.5 and "ignore_eos" not in body for body in server.bodies)
        too_long = await asyncio.to_thread(lambda: tool.run("bench", server.target, *arguments, "--prefix-tokens", 500))
        assert "and the model takes 500; lower --prompt-tokens" in too_long.stderr
