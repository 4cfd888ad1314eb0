"""Computes the KV of a prompt that requests are expected to begin with, so that they find it in the prefix cache.

A warm-up is a request for one token, whose output is discarded. Its tenant is charged for the prompt's full blocks,
which requests can find, and for each of them only once.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import EngineFinishReason, Event, Refused, Request, RequestFinished
from penstock.service.errors import from_refusal
from penstock.service.requests.contexts import ContextStore, StoredContext
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.preparation import Origin
from penstock.service.text.detokenizer import IdsOnly
from penstock.service.text.tokenizer import TokenizerPool

_LAST_PRIORITY = 1000
_HASH_BYTES = 8
"""The length of the prefix of a block's hash that is kept to recognize a charged block."""


class PaidPrefix:
    """The blocks of one prompt for which its tenant was charged."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes = b""
        """The prefixes of their hashes."""

    def num_tokens(self, hashes: Sequence[bytes]) -> int:
        """Returns how many tokens at the beginning of a prompt were charged; ``hashes`` are those of its blocks."""
        return self._num_common(hashes) * self._block_size

    def pay(self, hashes: Sequence[bytes]) -> None:
        """Records that the tenant was charged for the blocks with these hashes."""
        num_common = self._num_common(hashes)
        new = b"".join([block_hash[:_HASH_BYTES] for block_hash in hashes[num_common:]])
        self._hashes = self._hashes[: num_common * _HASH_BYTES] + new

    def _num_common(self, hashes: Sequence[bytes]) -> int:
        """Each hash covers all tokens before it, so once two hashes differ, all later ones do."""
        low, high = 0, min(len(hashes), len(self._hashes) // _HASH_BYTES)
        while low < high:
            middle = (low + high + 1) // 2
            is_same = hashes[middle - 1].startswith(self._hashes[(middle - 1) * _HASH_BYTES : middle * _HASH_BYTES])
            low, high = (middle, high) if is_same else (low, middle - 1)
        return low


class PrefixWarmer:
    """Runs warm-ups on one engine."""

    def __init__(
        self, engine: Engine, pool: TokenizerPool, request_builder: RequestBuilder, contexts: ContextStore
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._request_builder = request_builder
        self._contexts = contexts

    def new_paid_prefix(self) -> PaidPrefix:
        """Returns the paid prefix of a prompt of which nothing is charged."""
        return PaidPrefix(self._engine.facts.block_size)

    async def prepare(
        self, prompt: Callable[[], pb.GenerationStart], num_bytes: int, continue_from: str, origin: Origin
    ) -> tuple[Request, float]:
        """Returns the request that computes only the prompt of a start, and for how many seconds a thread worked. The
        thread calls ``prompt``, which returns the start, of about ``num_bytes``. ``continue_from`` is that of the
        start. Raises ServiceError."""
        context = self._contexts.existing(continue_from, origin.tenant) if continue_from else None
        work = functools.partial(self._make, prompt, context, origin)
        return await self._pool.run(work, num_bytes, origin.tenant, is_ahead=True)

    def _make(
        self, prompt: Callable[[], pb.GenerationStart], context: StoredContext | None, origin: Origin
    ) -> tuple[Request, float]:
        began = time.monotonic()
        only = _only_prompt(prompt())
        self._request_builder.check(only)
        request = self._request_builder.make(only, origin, lambda _: None, context=context).request
        request = replace(request, make_text=IdsOnly, priority=_LAST_PRIORITY, max_drafts=0, is_warm_up=True)
        return request, time.monotonic() - began

    async def run(self, request: Request, paid: PaidPrefix, retain_s: float) -> RequestFinished:
        """Runs a request of ``prepare`` to its end, and retains its KV. Charges the blocks that are not yet ``paid``,
        and marks them as paid. Raises ServiceError if it is refused."""
        ended: asyncio.Future[RequestFinished] = asyncio.get_running_loop().create_future()

        def on_event(event: Event) -> None:
            if isinstance(event, RequestFinished) and not ended.done():
                ended.set_result(event)

        hashes = request.block_hashes
        num_charged = len(hashes) * self._engine.facts.block_size - paid.num_tokens(hashes)
        num_paid = request.num_prompt_tokens - num_charged
        try:
            self._engine.submit(replace(request, sink=on_event, retain_s=retain_s, num_paid_tokens=num_paid))
            paid.pay(hashes)
            return await ended
        except Refused as error:
            raise from_refusal(error) from None
        finally:
            if not ended.done() or ended.cancelled():
                self._engine.abort(request.request_id, EngineFinishReason.CANCELLED)


def _only_prompt(start: pb.GenerationStart) -> pb.GenerationStart:
    """Returns a start with only the prompt of another one."""
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
    return only


def _allow_any_output(chat: pb.Chat) -> None:
    """Drops fields that only constrain the output."""
    if chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_NONE:
        chat.ClearField("tool_choice")
    for tool in chat.tools:
        tool.function.ClearField("strict")
