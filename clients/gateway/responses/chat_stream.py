"""Reads the answer to a chat as it arrives: text becomes content, reasoning and calls; tokens become log-probabilities.

Both chat endpoints use it. Independent of the format of chunks.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.events import ChoiceEnd, Delta
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.parsers.base import AnswerParser, ParsedDelta
from penstock.clients.gateway.requests.chat import build_chat_start
from penstock.clients.gateway.requests.forced_calls import fill_calls
from penstock.clients.gateway.requests.formats import parser_maker
from penstock.clients.gateway.responses.chat_places import ContentTokens, PlacedEntry
from penstock.clients.gateway.responses.logprobs import TokenNames, chat_entries
from penstock.clients.gateway.responses.stop_text import described_ids, finish_reason, stop_reason, with_stop
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.common import without_texts
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival
from penstock.v1 import TokenizeRequest


@dataclass(slots=True)
class Part:
    """New output of one choice."""

    choice: int
    piece: ParsedDelta
    logprobs: list[Json] = field(default_factory=list)
    """The entries in chat's format for all tokens since the last part."""
    content_logprobs: list[PlacedEntry] = field(default_factory=list)
    """Only the entries of the content's tokens."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """Only in a choice's last part."""
    stop_reason: int | str | None = None


async def start_chat(
    body: ChatRequest, headers: Mapping[str, str], caller: UpstreamCaller, *, with_reasoning: bool = True
) -> tuple[pb.GenerationStart, "ChatReader"]:
    """Returns the request to the service, and the reader of its answer. ``with_reasoning``: whether reasoning is shown.
    Raises GatewayError and RequestFailed."""
    new_parser, shows_special_tokens = await parser_maker(body, caller)
    start = build_chat_start(body, headers, caller)
    await fill_calls(start, body, caller)
    if shows_special_tokens:
        start.output.include_special_tokens = True
    specials = start.output.include_special_tokens
    return start, ChatReader(body, caller, new_parser, specials=specials, with_reasoning=with_reasoning)


class _ChatChoice:
    """The state of one choice."""

    def __init__(self, parser: AnswerParser, *, specials: bool) -> None:
        self.parser = parser
        self.content = ContentTokens(specials=specials)
        self.has_calls = False
        self.has_half_call = False
        self.logprobs: list[Json] = []
        self.token_ids: list[int] = []
        self.reasoning: list[str] = []
        """Recorded even if it is not shown."""


class ChatReader:
    """Reads the answer to one request. While a parser holds text back, its tokens and log-probabilities are held back
    too."""

    def __init__(
        self,
        body: ChatRequest,
        caller: UpstreamCaller,
        new_parser: Callable[[], AnswerParser],
        *,
        specials: bool,
        with_reasoning: bool,
    ) -> None:
        """``new_parser`` makes one for each choice; ``specials``: whether special tokens are in the text."""
        self._body = without_texts(body)
        self._caller = caller
        self._eos = frozenset(caller.model.eos_token_ids)
        self._choices = [_ChatChoice(new_parser(), specials=specials) for _ in range(body.num_choices)]
        self._with_reasoning = with_reasoning

    async def read(self, arrivals: Sequence[Arrival]) -> list[Part]:
        """Returns the parts that events add to the answer. Raises RequestFailed."""
        deltas = [event for _, event in arrivals if isinstance(event, Delta)]
        ids = set[int]().union(*(described_ids(delta, self._body) for delta in deltas))
        known = await self._caller.describe(ids) if ids else {}
        names = TokenNames(known, as_ids=bool(self._body.return_tokens_as_token_ids))
        parts = (self._read(delta, names) for delta in deltas)
        return [part for part in parts if part is not None]

    async def count_reasoning_tokens(self) -> int:
        """Counts the tokens in the reasoning of all choices so far, with the tokenizer: the service reports only the
        tokens of a whole answer."""
        texts = filter(None, ("".join(choice.reasoning) for choice in self._choices))
        return sum(await asyncio.gather(*map(self._count_tokens, texts)))

    async def _count_tokens(self, text: str) -> int:
        request = TokenizeRequest(text=text, add_special_tokens=False)
        try:
            return len((await self._caller.call(self._caller.stubs.tokenizer.Tokenize, request)).token_ids)
        except RequestFailed:
            return 0  # the answer is valid without this figure

    def _read(self, delta: Delta, names: TokenNames) -> Part | None:
        choice = self._choices[delta.choice]
        choice.token_ids += delta.token_ids
        text = with_stop(delta, self._body, names)
        if delta.logprobs is not None:
            entries = chat_entries(delta.token_ids, delta.logprobs, names)
            choice.logprobs += entries
            choice.content.add_tokens(text, delta.token_ids, entries, names)
        piece = choice.parser.feed(text)
        if delta.end is not None:
            piece += choice.parser.end()
        if piece.reasoning:
            choice.reasoning.append(piece.reasoning)
        if not self._with_reasoning:
            piece = replace(piece, reasoning="")
        choice.has_calls = choice.has_calls or bool(piece.calls)
        choice.has_half_call = choice.has_half_call or any(call.breaks_off for call in piece.calls)
        if not piece and delta.end is None:
            return None
        part = Part(delta.choice, piece, choice.logprobs, choice.content.take_entries(piece.spans), choice.token_ids)
        choice.logprobs, choice.token_ids = [], []
        if delta.end is not None:
            part.finish_reason = _finish_reason(choice, delta.end)
            part.stop_reason = stop_reason(delta.end, self._eos)
        return part


def _finish_reason(choice: _ChatChoice, end: ChoiceEnd) -> str | None:
    reason = finish_reason(end)
    # This makes callers run the calls, so every call must be complete.
    return "tool_calls" if reason == "stop" and choice.has_calls and not choice.has_half_call else reason
