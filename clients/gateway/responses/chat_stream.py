"""Reads the answer to a chat as it arrives: content, reasoning and calls; tokens become log-probabilities.

Both chat endpoints use it. Independent of the format of chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.clients.events import Delta
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.responses.chat_places import ContentTokens, PlacedEntry
from penstock.clients.gateway.responses.logprobs import TokenNames, chat_entries
from penstock.clients.gateway.responses.stop_text import finish_reason, shown_stops, stop_reason, with_stop
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.common import ReceivedChoice, without_texts
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Arrival
from penstock.clients.output import ToolCallPart
from penstock.v1 import TokenDescription


@dataclass(slots=True)
class Part:
    """New output of one choice."""

    choice: int
    content: str
    content_at: int = 0
    """The position of ``content`` in the choice's whole content."""
    reasoning: str = ""
    calls: Sequence[ToolCallPart] = ()
    logprobs: list[Json] = field(default_factory=list)
    """The entries of its tokens in chat's format."""
    content_logprobs: list[PlacedEntry] = field(default_factory=list)
    """Only the entries of the content's tokens."""
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    """Only in a choice's last part."""
    stop_reason: int | str | None = None


class _ChatChoice:
    """The state of one choice."""

    def __init__(self) -> None:
        self.content = ContentTokens()
        self.content_length = 0
        self.is_in_reasoning = False
        """Whether the output so far ends with reasoning."""

    def resume(self, received: ReceivedChoice) -> None:
        """Advances to where a caller's copy of the output ends."""
        self.content_length = received.text_chars
        self.is_in_reasoning = bool(received.reasoning_chars) and not (received.text_chars or received.tool_calls)


class ChatReader:
    """Reads the answer to one request."""

    def __init__(self, body: ChatRequest, caller: UpstreamCaller, *, with_reasoning: bool = True) -> None:
        """``with_reasoning``: whether reasoning is shown."""
        self._body = without_texts(body)
        self._caller = caller
        self._names = TokenNames(as_ids=bool(body.return_tokens_as_token_ids))
        self._eos = frozenset(caller.model.eos_token_ids)
        self._choices = [_ChatChoice() for _ in range(body.num_choices)]
        for choice, received in zip(self._choices, body.received_choices, strict=False):
            choice.resume(received)
        self._with_reasoning = with_reasoning

    async def read(self, arrivals: Sequence[Arrival]) -> list[Part]:
        """Returns the parts that events add to the answer. Raises RequestFailed."""
        deltas = [event for _, event in arrivals if isinstance(event, Delta)]
        stops = shown_stops(deltas, self._body)
        known = await self._caller.describe(stops) if stops else {}
        return [self._read(delta, known) for delta in deltas]

    def skip_text(self, delta: Delta) -> None:
        """Advances past a delta that has only text, instead of ``read``."""
        choice = self._choices[delta.choice]
        choice.content_length += len(delta.text)
        choice.is_in_reasoning = False

    def _read(self, delta: Delta, known: Mapping[int, TokenDescription]) -> Part:
        choice = self._choices[delta.choice]
        part = Part(
            delta.choice,
            delta.text,
            choice.content_length,
            delta.reasoning,
            delta.tool_calls,
            token_ids=delta.token_ids,
        )
        if delta.logprobs is not None:
            part.logprobs = chat_entries(delta.token_ids, delta.logprobs, self._names)
            content = range(part.content_at, part.content_at + len(delta.text))
            part.content_logprobs = choice.content.place_entries(delta.logprobs, part.logprobs, content)
        choice.content_length += len(delta.text)
        if delta.reasoning or delta.text or delta.tool_calls:
            choice.is_in_reasoning = not (delta.text or delta.tool_calls)
        if delta.end is not None:
            _add_stop(
                part, with_stop(delta, self._body, known)[len(delta.text) :], is_in_reasoning=choice.is_in_reasoning
            )
            part.finish_reason = finish_reason(delta.end)
            part.stop_reason = stop_reason(delta.end, self._eos)
        if not self._with_reasoning:
            part.reasoning = ""
        return part


def _add_stop(part: Part, stop: str, *, is_in_reasoning: bool) -> None:
    """Adds the text of the stop that ended the output, if it is kept, to what it interrupted."""
    if not stop:
        return
    if is_in_reasoning:
        part.reasoning += stop
    elif part.calls and part.calls[-1].is_incomplete:
        *others, last = part.calls
        part.calls = [*others, replace(last, arguments=last.arguments + stop)]
    else:
        part.content += stop
