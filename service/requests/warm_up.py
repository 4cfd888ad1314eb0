"""Computes the KV of a prompt that requests are expected to begin with, so that they find it in the prefix cache.

A warm-up is a request for one token, whose output is discarded.
"""

import asyncio
import time
from dataclasses import replace

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import EngineFinishReason, Event, Refused, Request, RequestFinished
from penstock.service.errors import from_refusal
from penstock.service.requests.contexts import ContextStore
from penstock.service.requests.generate import Origin, RequestBuilder
from penstock.service.text.detokenizer import IdsOnly

_LAST_PRIORITY = 1000


class PrefixWarmer:
    """Runs warm-ups on one engine."""

    def __init__(self, engine: Engine, request_builder: RequestBuilder, contexts: ContextStore) -> None:
        self._engine = engine
        self._request_builder = request_builder
        self._contexts = contexts

    async def prepare(
        self, start: pb.GenerationStart, request_id: str, tenant: str, deadline: float | None = None
    ) -> Request:
        """Returns the request that computes the prompt of ``start``, and nothing else of it. Raises ServiceError."""
        only = pb.GenerationStart(continue_from=start.continue_from, sampling=pb.SamplingParams(max_tokens=1))
        kind = start.WhichOneof("prompt")
        if kind == "text":
            only.text = start.text
        elif kind == "token_ids":
            only.token_ids.CopyFrom(start.token_ids)
        elif kind == "chat":
            only.chat.CopyFrom(start.chat)
            only.chat.add_generation_prompt = False
            only.chat.continue_final_message = False
            _allow_any_output(only.chat)
        self._request_builder.check(only)
        context = None
        if start.continue_from:
            context = self._contexts.existing(start.continue_from, tenant)
        origin = Origin(request_id, tenant, time.monotonic(), deadline)
        prepared = await self._request_builder.prepare(only, origin, lambda _: None, context=context)
        return replace(prepared.request, make_text=IdsOnly, priority=_LAST_PRIORITY, max_drafts=0, is_warm_up=True)

    async def run(self, request: Request, retain_s: float) -> RequestFinished:
        """Runs a request of ``prepare`` to its end, and retains its KV. Raises ServiceError if it is refused."""
        ended: asyncio.Future[RequestFinished] = asyncio.get_running_loop().create_future()

        def on_event(event: Event) -> None:
            if isinstance(event, RequestFinished) and not ended.done():
                ended.set_result(event)

        try:
            self._engine.submit(replace(request, sink=on_event, retain_s=retain_s))
            return await ended
        except Refused as error:
            raise from_refusal(error) from None
        finally:
            if not ended.done() or ended.cancelled():
                self._engine.abort(request.request_id, EngineFinishReason.CANCELLED)


def _allow_any_output(chat: pb.Chat) -> None:
    """Drops what only constrains the output."""
    if chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_NONE:
        chat.ClearField("tool_choice")
    for tool in chat.tools:
        tool.function.ClearField("strict")
