"""``penstock bench --api openai``: the same load over HTTP, for servers with an OpenAI-compatible API.

Sends prompts to ``/v1/completions`` as token ids. ``/v1/chat/completions`` accepts only text, so each id becomes an
English word. Needs aiohttp, which costs half as much per line of a stream as httpx.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Self

import aiohttp

from penstock.clients.bench.target import OK, Record, context
from penstock.clients.bench.workload import BenchRequest
from penstock.clients.chat_messages import ChatMessage
from penstock.clients.cli.options import ConnectionOptions, ssl_context
from penstock.clients.errors import PenstockError

DEFAULT_ENDPOINT = "/v1/completions"

_CONNECT_SECONDS = 60.0
_MAX_SHOWN = 300
_BODY: dict[str, object] = {
    "stream": True,
    # vLLM and SGLang support the second option, and vLLM the id list; other servers ignore them.
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
}
_TEXT = """
    the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were
    when we there can an your which their said if do will each about how up out them then she many some so these would
    other into has more her two like him see time could no make than first been its who now people my made over did
"""
_WORDS = _TEXT.split()


class OpenAiCaller:
    """Calls one server, with one connection per concurrent request. Use it from one event loop.

    Later turns of a conversation resend its whole context.
    """

    def __init__(
        self,
        service: ConnectionOptions,
        *,
        model: str = "",
        endpoint: str = DEFAULT_ENDPOINT,
        timeout_s: float | None = None,
    ) -> None:
        scheme = "http" if service.tls is None else "https"
        self._base = (service.target if "://" in service.target else f"{scheme}://{service.target}").rstrip("/")
        self._endpoint = endpoint
        self._is_chat = endpoint.rstrip("/").endswith("/chat/completions")
        self._model = model
        self._timeout_s = timeout_s
        headers = {} if service.api_key is None else {"Authorization": f"Bearer {service.api_key}"}
        connector = aiohttp.TCPConnector(limit=0, ssl=ssl_context(service.tls) if service.tls is not None else True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels running requests and closes the connections."""
        await self._session.close()

    async def model(self) -> tuple[str, int | None]:
        """Returns the name of the given model or else of the server's first one, and the limit of its context if the
        server reports it. Uses this model from now on. Raises PenstockError."""
        url = f"{self._base}{self._endpoint.partition('/v1/')[0]}/v1/models"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_CONNECT_SECONDS)) as response:
                status, body = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PenstockError(f"cannot reach the server {self._base}: {str(error) or type(error).__name__}") from None
        try:
            models = {str(each["id"]): each for each in json.loads(body)["data"]}
        except (ValueError, KeyError, TypeError):
            models = {}
        # A server may serve more than it lists, or list nothing, so a given name is not checked.
        self._model = self._model or next(iter(models), "")
        if not self._model:
            answer = " ".join(body.split())[:_MAX_SHOWN]
            raise PenstockError(f"--model: required, since {url} lists none; it returned HTTP {status}: {answer}")
        most = models.get(self._model, {}).get("max_model_len")
        return self._model, most if isinstance(most, int) else None

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(self._base + self._endpoint, json=self._body(request, past)) as response,
            ):
                if response.status == 200:
                    await self._read(response, record)
                else:
                    retry_after = response.headers.get("Retry-After", "")
                    record.retry_after_s = float(retry_after) if retry_after.isdecimal() else None
                    body = await response.text()
                    record.fail(time.perf_counter(), f"HTTP {response.status}", body[:_MAX_SHOWN])
        except TimeoutError:
            record.fail(time.perf_counter(), "DEADLINE_EXCEEDED", "the deadline passed")
        except (aiohttp.ClientError, OSError) as error:
            record.fail(time.perf_counter(), "UNAVAILABLE", str(error) or type(error).__name__)

    def _body(self, request: BenchRequest, past: Sequence[Record]) -> dict[str, object]:
        body = {**_BODY, "model": self._model, "max_tokens": request.max_tokens, **request.options}
        if self._is_chat:
            body["messages"] = chat_messages(request, past)
        else:
            body["prompt"] = context(request, past)
        return {name: value for name, value in body.items() if value is not None}

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        events = _Events(record, keeps_text=self._is_chat)
        rest = b""
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            events.take_lines(now, lines)
            if record.status:
                return
        events.take_lines(time.perf_counter(), [rest])
        events.end(time.perf_counter())


class _Events:
    """Reads the lines of one response. Events that arrive together count as one message."""

    def __init__(self, record: Record, *, keeps_text: bool) -> None:
        self._record = record
        self._keeps_text = keeps_text
        self._num_tokens = 0
        self._usage: dict[str, Any] = {}

    def take_lines(self, now: float, lines: Sequence[bytes]) -> None:
        """Records lines and the time at which they arrived."""
        token_ids: list[int] = []
        before = self._num_tokens
        for line in lines:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            try:
                token_ids += self._event(now, json.loads(data))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                shown = data[:_MAX_SHOWN].decode(errors="replace")
                self._record.fail(now, "BAD_ANSWER", f"not an event of a completion: {shown}")
                return
        if self._num_tokens > before:
            self._record.tokens(now, token_ids, self._num_tokens - before)

    def end(self, now: float) -> None:
        """Records the end of the response."""
        record = self._record
        if not record.finish_reason:
            record.fail(now, "UNAVAILABLE", "the response ended early")
            return
        record.prompt_tokens = int(self._usage.get("prompt_tokens") or 0)
        record.output_tokens = int(self._usage.get("completion_tokens") or self._num_tokens)
        record.cached_tokens = int((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        record.ended_s, record.status = now, OK

    def _event(self, now: float, event: dict[str, Any]) -> list[int]:
        """Records an event and returns its token ids, if the server sends them."""
        record = self._record
        if error := event.get("error"):
            record.fail(now, "ERROR", str(error.get("message") if isinstance(error, dict) else error)[:_MAX_SHOWN])
            return []
        record.request_id = record.request_id or str(event.get("id") or "")
        usage = event.get("usage")
        self._usage = usage or self._usage
        if not event.get("choices"):
            return []
        choice = event["choices"][0]
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
        text = _text(choice)
        if self._keeps_text:
            record.text += text
        token_ids: list[int] = choice.get("token_ids") or []
        if token_ids:
            self._num_tokens += len(token_ids)
        elif text and usage:
            self._num_tokens = max(self._num_tokens, usage["completion_tokens"])
        elif text:
            self._num_tokens += 1  # the best guess, until the last event has the usage
        return token_ids


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(
        choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
    )


def chat_messages(request: BenchRequest, past: Sequence[Record]) -> list[ChatMessage]:
    """Returns the conversation that a request stands for in a chat: a word for each token id."""
    messages: list[ChatMessage] = []
    for record in past:
        messages.append({"role": "user", "content": _words(record.request.prompt_token_ids)})
        messages.append({"role": "assistant", "content": record.text})
    return [*messages, {"role": "user", "content": _words(request.prompt_token_ids)}]


def _words(token_ids: Sequence[int]) -> str:
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)
