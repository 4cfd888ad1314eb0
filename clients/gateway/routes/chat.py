"""POST /v1/chat/completions: answers conversations."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.clients.events import Delta, Event, PromptLogprobs
from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.field_names import caller_name
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.chat import (
    build_chat_start,
    chat_names,
    check_chat,
    content_text,
    rendered_ids,
)
from penstock.clients.gateway.requests.prompts import ID_BYTES
from penstock.clients.gateway.requests.tool_choice import with_allowed_tools
from penstock.clients.gateway.requests.truncation import truncated
from penstock.clients.gateway.responses.chat_stream import ChatReader, Part
from penstock.clients.gateway.responses.http_response import StreamingOrWholeResponse, TextTemplate
from penstock.clients.gateway.responses.logprobs import TokenNames, prompt_entries
from penstock.clients.gateway.responses.usage import UsageTracker
from penstock.clients.gateway.routes.caller_route import GENERATION_ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.chat import ChatCompletion, ChatRequest
from penstock.clients.gateway.schemas.common import without_texts
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival
from penstock.clients.output import ToolCallPart

_OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer. With `stream`, server-sent events with one chunk each, followed by `[DONE]`.",
        "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/ChatChunk"}}},
    }
}


def make_router() -> APIRouter:
    """Makes the route."""
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=GENERATION_ERRORS | _OK,
        summary="Answer a conversation",
        description="OpenAI's chat completions, with vLLM's additional fields. Combined, the chunks of a streamed "
        "answer are the same as the answer without `stream`.",
    )
    async def chat(body: ChatRequest, request: Request, caller: CallerDep) -> Response:
        check_chat(body, caller)
        allowed = with_allowed_tools(body)
        body = allowed.chat
        names = (*allowed.names, *chat_names(body))
        with_reasoning = body.include_reasoning is not False
        start = build_chat_start(body, request.headers, caller)
        reader = ChatReader(body, caller, with_reasoning=with_reasoning)
        prompt_token_ids: Sequence[int] | None = None
        if body.return_token_ids or body.prompt_logprobs is not None:
            rendered = await rendered_ids(body, caller, partial(caller_name, names=names))
            prompt_token_ids = truncated(rendered, body, caller)
        return StreamingOrWholeResponse(
            caller,
            [start],
            ChatWriter(body, caller, reader, prompt_token_ids),
            stream=bool(body.stream),
            caller_name=lambda _, field: caller_name(field, names),
            shows_ticket=True,
        )

    return router


class _WholeChoice:
    """Combines the chunks of one choice."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[Json, list[str]]] = {}
        """The first part of each call, and the parts of its arguments."""
        self._logprobs: list[Json] | None = None
        self._token_ids: list[int] | None = None
        self._end: Json = {}

    def add_part(self, part: Json) -> None:
        delta = part["delta"]
        self._content.append(delta.get("content", ""))
        self._reasoning.append(delta.get("reasoning_content", ""))
        for piece in delta.get("tool_calls", ()):
            self._calls.setdefault(piece["index"], (piece, []))[1].append(piece["function"]["arguments"])
        if part["logprobs"] is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += part["logprobs"]["content"]
        if "token_ids" in part:
            self._token_ids = self._token_ids or []
            self._token_ids += part["token_ids"]
        if part["finish_reason"] is not None:
            self._end = {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}

    def result(self, index: int) -> Json:
        content = "".join(self._content)
        calls = [
            {"id": first["id"], "type": "function", "function": first["function"] | {"arguments": "".join(arguments)}}
            for _, (first, arguments) in sorted(self._calls.items())
        ]
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if reasoning := "".join(self._reasoning):
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": logprobs, **self._end}
        return choice if self._token_ids is None else choice | {"token_ids": self._token_ids}


class WholeChat:
    """Combines chunks into one answer."""

    def __init__(self) -> None:
        self._answer: Json = {}
        self._of_prompt: Json = {}
        self._choices: dict[int, _WholeChoice] = {}

    def add_chunk(self, chunk: Json) -> None:
        self._answer = chunk
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if name in chunk:
                self._of_prompt.setdefault(name, []).extend(chunk.pop(name))
        for part in chunk["choices"]:
            self._choices.setdefault(part["index"], _WholeChoice()).add_part(part)

    def result(self) -> Json:
        """Returns the answer; the last chunk has all fields outside the choices."""
        choices = [choice.result(index) for index, choice in sorted(self._choices.items())]
        return {**self._answer, "object": "chat.completion", "choices": choices, **self._of_prompt}


class ChatWriter:
    """Writes the chunks of a chat's answer."""

    whole = WholeChat

    def __init__(
        self, body: ChatRequest, caller: UpstreamCaller, reader: ChatReader, prompt_token_ids: Sequence[int] | None
    ) -> None:
        self._body = without_texts(body)
        self._has_prediction = body.prediction is not None
        self._reader = reader
        self._prompt_token_ids = prompt_token_ids
        self._echoed = content_text(body.messages[-1].content, "messages") if body.echo else ""
        self.num_kept_bytes = len(self._echoed) + ID_BYTES * len(prompt_token_ids or ())
        self._usage_tracker = UsageTracker(body, caller, "chat.completion.chunk", "chatcmpl-")
        self._has_templates = not (body.logprobs or body.return_token_ids or self._usage_tracker.shows_usage_so_far)
        self._templates: dict[int, TextTemplate] = {}

    def begin_response(self, request_id: str) -> list[Json]:
        """Returns a chunk with the role for each choice."""
        self._usage_tracker.set_request_id(request_id)
        chunks = [
            self._usage_tracker.chunk([self._choice(index, {"role": "assistant", "content": self._echoed})])
            for index in range(self._body.num_choices)
        ]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._prompt_token_ids or ())
        if self._body.prompt_logprobs is not None:
            chunks[0]["prompt_logprobs"] = [None]
        return chunks

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        chunks: list[Json] = []
        for _, event in arrivals:
            self._usage_tracker.count(event)
            if isinstance(event, PromptLogprobs):
                chunks.append(self._prompt_part(event))
        chunks += [self._usage_tracker.chunk([self._part(part)]) for part in await self._reader.read(arrivals)]
        return chunks

    def text_event(self, _: int, event: Event) -> bytes | None:
        if not (self._has_templates and isinstance(event, Delta) and event.text and event.is_plain):
            return None
        self._usage_tracker.count(event)
        self._reader.skip_text(event)
        if (template := self._templates.get(event.choice)) is None:
            template = self._templates[event.choice] = TextTemplate(
                lambda text: self._usage_tracker.chunk([self._part(Part(event.choice, text))])
            )
        return template.event(event.text)

    def end(self) -> list[Json]:
        return self._usage_tracker.last_chunk(shows_reasoning=True, shows_prediction=self._has_prediction)

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the error in the form that OpenAI's clients understand."""
        return [error.body()]

    def _prompt_part(self, part: PromptLogprobs) -> Json:
        assert self._prompt_token_ids is not None, "prompt_logprobs has the prompt rendered first"
        ids = self._prompt_token_ids[part.start : part.start + len(part.logprobs.chosen)]
        names = TokenNames(as_ids=bool(self._body.return_tokens_as_token_ids))
        return self._usage_tracker.chunk([]) | {"prompt_logprobs": prompt_entries(ids, part.logprobs, names)}

    def _part(self, part: Part) -> Json:
        choice = self._choice(part.choice, _delta(part))
        if self._body.logprobs:
            choice["logprobs"] = {"content": part.logprobs}
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        choice["finish_reason"] = part.finish_reason
        if part.finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
        return choice

    def _choice(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(part: Part) -> Json:
    delta: Json = {}
    if part.reasoning:
        delta |= {"reasoning": part.reasoning, "reasoning_content": part.reasoning}
    if part.content:
        delta["content"] = part.content
    if calls := [_call(call) for call in part.calls if call.id or call.arguments]:
        delta["tool_calls"] = calls
    return delta


def _call(piece: ToolCallPart) -> Json:
    call: Json = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.id:
        call |= {"id": piece.id, "type": "function"}
        call["function"] = {"name": piece.name, "arguments": piece.arguments}
    return call
