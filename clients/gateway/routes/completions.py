"""POST /v1/completions: continues texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response

import penstock.v1 as pb
from penstock.clients.events import Delta, Event, PromptLogprobs
from penstock.clients.gateway.errors import GatewayError, invalid
from penstock.clients.gateway.field_names import IDEMPOTENCY_KEY, caller_name
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.constraints import constraint_names, fill_constraint
from penstock.clients.gateway.requests.prompts import ParsedPrompt, prompt_names, read_prompts
from penstock.clients.gateway.requests.resumption import check_resumed_echo
from penstock.clients.gateway.requests.sampling import (
    check_model,
    check_stream_fields,
    fill_output,
    fill_sampling,
    new_start,
    sampling_names,
)
from penstock.clients.gateway.responses.http_response import StreamingOrWholeResponse, TextTemplate
from penstock.clients.gateway.responses.logprobs import (
    ChoiceLists,
    TokenNames,
    prompt_entries,
)
from penstock.clients.gateway.responses.stop_text import finish_reason, shown_stops, stop_reason, with_stop
from penstock.clients.gateway.responses.usage import UsageTracker
from penstock.clients.gateway.routes.caller_route import GENERATION_ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.common import is_single, without_texts
from penstock.clients.gateway.schemas.completions import DEFAULT_MAX_TOKENS, CompletionRequest, CompletionResponse
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival
from penstock.v1 import TokenDescription

_MAX_STARTS_BYTES = 64 << 20
"""The limit for all requests to the service from one HTTP request."""


def make_router() -> APIRouter:
    """Makes the route."""
    router = APIRouter(route_class=CallerRoute, tags=["generation"])

    @router.post(
        "/v1/completions",
        response_model=CompletionResponse,
        responses=GENERATION_ERRORS,
        summary="Continue one or more texts",
        description="OpenAI's completions, with vLLM's additional fields. With `stream`, the answer is a series "
        "of server-sent events with one chunk each, followed by `[DONE]`. A chunk has the answer's format, but only "
        "the new part. Combined, the chunks are the same as the answer without `stream`.",
    )
    async def complete(body: CompletionRequest, request: Request, caller: CallerDep) -> Response:
        _check(body)
        check_model(body.model, caller)
        prompts = await read_prompts(body, caller)
        starts = _starts(prompts, body, request.headers, caller)
        writer = CompletionWriter(body, prompts, caller)
        return StreamingOrWholeResponse(
            caller, starts, writer, stream=bool(body.stream), caller_name=_namer(body), shows_ticket=True
        )

    return router


def _namer(body: CompletionRequest) -> Callable[[int, str], str]:
    """Returns a function that names the fields of a caller's request. It lives as long as the answer, so it does not
    hold the request."""
    is_alone, others = is_single(body.prompt), (*constraint_names(body), *sampling_names(body))
    return lambda index, field: caller_name(field, (*prompt_names(is_alone, index), *others))


def _check(body: CompletionRequest) -> None:
    check_stream_fields(body)
    if body.suffix:
        raise invalid("suffix", "is not supported: text can only be continued", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != body.num_choices:
        raise invalid("best_of", "must equal n or be absent: all choices that are generated are returned")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1; 0 needs echo: true")
    check_resumed_echo(body.resume_from, body.echo)


def _starts(
    prompts: Sequence[ParsedPrompt], body: CompletionRequest, headers: Headers, caller: UpstreamCaller
) -> list[pb.GenerationStart]:
    """Returns one request for each prompt. Each has all options, so together they may be many times the size of the
    body."""
    starts: list[pb.GenerationStart] = []
    num_bytes = 0
    for prompt in prompts:
        starts.append(_start(prompt, body, headers, caller))
        if len(prompts) > 1 and starts[-1].idempotency_key:  # some may succeed while others fail
            raise invalid(IDEMPOTENCY_KEY, "only with one prompt; send one request per prompt")
        if len(prompts) > 1 and body.resume_from is not None:
            raise invalid("resume_from", "only with one prompt; send one request per prompt, without it")
        num_bytes += starts[-1].ByteSize()
        if num_bytes > _MAX_STARTS_BYTES:
            message = "the prompts, each with the options, are too large for one request; send fewer of them at once"
            raise GatewayError(413, message, param="prompt", code="request_too_large")
    return starts


def _start(
    prompt: ParsedPrompt, body: CompletionRequest, headers: Headers, caller: UpstreamCaller
) -> pb.GenerationStart:
    start = new_start(body, headers, caller.settings)
    prompt.put_into(start)
    # A prompt that is only scored still generates a token, which is not shown.
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    fill_sampling(start.sampling, body, max_tokens)
    wanted = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
    fill_output(start.output, body, body.logprobs, max(wanted, default=None))
    fill_constraint(start, body)
    return start


class WholeCompletion:
    """Combines chunks into one answer."""

    def __init__(self) -> None:
        self._answer: Json = {}
        self._choices: dict[int, Json] = {}
        self._texts: dict[int, list[str]] = {}

    def add_chunk(self, chunk: Json) -> None:
        self._answer = chunk
        for part in chunk["choices"]:
            index = part["index"]
            self._texts.setdefault(index, []).append(part.pop("text"))
            _fold(self._choices.setdefault(index, {}), part)

    def result(self) -> Json:
        """Returns the answer; the last chunk has all fields outside the choices."""
        choices = [
            {"index": index, "text": "".join(self._texts[index])} | choice
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._answer, "choices": choices}


def _fold(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Merges a part into the whole: lists are appended, also in objects; for everything else, the last value counts."""
    for name, value in part.items():
        before = whole.get(name)
        if isinstance(before, list) and isinstance(value, list):
            before += value
        elif isinstance(before, dict) and isinstance(value, dict):
            _fold(before, value)
        elif value is not None or name not in whole:
            whole[name] = value


class CompletionWriter:
    """Writes the chunks of a completion's answer."""

    whole = WholeCompletion

    def __init__(self, body: CompletionRequest, prompts: Sequence[ParsedPrompt], caller: UpstreamCaller) -> None:
        self._body = without_texts(body)
        shows_prompts = body.echo or body.return_token_ids or body.prompt_logprobs is not None
        self._prompts = prompts if shows_prompts else [ParsedPrompt()] * len(prompts)
        self.num_kept_bytes = sum(each.num_bytes for each in self._prompts)
        self._caller = caller
        self._usage_tracker = UsageTracker(body, caller, "text_completion", "cmpl-")
        self._eos = frozenset(caller.model.eos_token_ids)
        self._scores_alone = body.max_tokens == 0
        n = body.num_choices
        self._choices = [[ChoiceLists(at * n + i) for i in range(n)] for at in range(len(prompts))]
        for choice, received in zip(self._choices[0], body.received_choices, strict=False):
            choice.resume(received.text_chars, has_tokens=bool(received.token_ids))
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self._names = TokenNames(as_ids=bool(body.return_tokens_as_token_ids))
        self._begun = False
        self._has_templates = not (
            self._scores_alone or body.return_token_ids or self._usage_tracker.shows_usage_so_far
        )
        self._templates: dict[int, TextTemplate] = {}

    def begin_response(self, request_id: str) -> list[Json]:
        self._usage_tracker.set_request_id(request_id)
        return []

    async def add_arrivals(self, arrivals: Sequence[Arrival]) -> list[Json]:
        """Returns chunks of the prompts, if they are shown, and of new events."""
        known = await self._describe(arrivals)
        chunks: list[Json] = []
        if not self._begun:
            self._begun = True
            chunks = self._show_prompts(known)
        for at, event in arrivals:
            self._usage_tracker.count(event)
            if isinstance(event, Delta):
                chunks += self._delta(self._choices[at][event.choice], event, known)
            elif isinstance(event, PromptLogprobs):
                chunks += self._prompt_part(at, event)
        return chunks

    def text_event(self, index: int, event: Event) -> bytes | None:
        if not (self._begun and self._has_templates and isinstance(event, Delta) and event.is_plain):
            return None
        self._usage_tracker.count(event)
        choice = self._choices[index][event.choice]
        if (template := self._templates.get(choice.index)) is None:
            template = self._templates[choice.index] = TextTemplate(
                lambda text: self._usage_tracker.chunk([self._empty(choice) | {"text": text}])
            )
        return template.event(event.text)

    def end(self) -> list[Json]:
        return self._usage_tracker.last_chunk(without_output=self._scores_alone)

    def failed(self, error: GatewayError) -> list[Json]:
        """Returns the error in the form that OpenAI's clients understand."""
        return [error.body()]

    async def _describe(self, arrivals: Sequence[Arrival]) -> Mapping[int, TokenDescription]:
        """Describes the tokens that the answer shows without log-probabilities: stop tokens, and the first tokens of
        prompts."""
        ids = shown_stops((event for _, event in arrivals if isinstance(event, Delta)), self._body)
        if not self._begun and self._echoes_logprobs:
            ids.update(prompt.token_ids[0] for prompt in self._prompts if prompt.token_ids)
        return await self._caller.describe(ids) if ids else {}

    def _show_prompts(self, known: Mapping[int, TokenDescription]) -> list[Json]:
        if not (self._body.echo or self._body.return_token_ids or self._body.prompt_logprobs is not None):
            return []
        chunks = []
        for prompt, choices in zip(self._prompts, self._choices, strict=True):
            for choice in choices:
                shown = self._empty(choice)
                if self._body.echo:
                    shown["text"] = prompt.text
                    choice.after(prompt.text or "")
                if self._body.return_token_ids:
                    shown |= {"prompt_token_ids": list(prompt.token_ids or ()), "token_ids": []}
                if self._echoes_logprobs and prompt.token_ids:
                    shown["logprobs"] = choice.begin_prompt(prompt, known[prompt.token_ids[0]].text, self._names)
                if self._body.prompt_logprobs is not None:
                    shown["prompt_logprobs"] = [None]
                chunks.append(self._usage_tracker.chunk([shown]))
        return chunks

    def _prompt_part(self, at: int, part: PromptLogprobs) -> list[Json]:
        token_ids = self._prompts[at].token_ids
        assert token_ids is not None, "read_prompts returns the ids of prompts whose log-probabilities are requested"
        ids = token_ids[part.start : part.start + len(part.logprobs.chosen)]
        chunks = []
        for choice in self._choices[at]:
            shown = self._empty(choice)
            if self._echoes_logprobs:
                logprobs = part.logprobs.cut(self._body.logprobs or 0)
                shown["logprobs"] = choice.add_prompt(self._prompts[at], part.start, logprobs, self._names)
            if self._body.prompt_logprobs is not None:
                logprobs = part.logprobs.cut(self._body.prompt_logprobs)
                shown["prompt_logprobs"] = prompt_entries(ids, logprobs, self._names)
            chunks.append(self._usage_tracker.chunk([shown]))
        return chunks

    def _delta(self, choice: ChoiceLists, delta: Delta, known: Mapping[int, TokenDescription]) -> list[Json]:
        shown = self._empty(choice)
        if delta.end is not None:
            shown["finish_reason"] = finish_reason(delta.end)
            shown["stop_reason"] = stop_reason(delta.end, self._eos)
        if self._scores_alone:
            return [self._usage_tracker.chunk([shown | {"finish_reason": "length"}])] if delta.end is not None else []
        shown["text"] = with_stop(delta, self._body, known)
        if delta.logprobs is not None:
            shown["logprobs"] = choice.add_tokens(delta, delta.logprobs, shown["text"], self._names)
        if self._body.return_token_ids:
            shown["token_ids"] = delta.token_ids
        return [self._usage_tracker.chunk([shown])]

    @staticmethod
    def _empty(choice: ChoiceLists) -> Json:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
