"""Parses a request's output between the engine and the request's receiver: text becomes content, reasoning and calls.

Tokens and log-probabilities are held back while the parser holds back their text. A request whose output is not parsed
does without it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import penstock.v1 as pb
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import EngineFinishReason, PromptLogprobsChunk, SequenceDelta
from penstock.service.parsers.base import AnswerParser, Spans
from penstock.service.streaming.outbox import RequestReceiver
from penstock.service.streaming.parsed_delta import ParsedSequenceDelta
from penstock.service.streaming.pending_message import OutputForm


@dataclass(slots=True)
class _Token:
    """A token that is held back, and the text that begins in it."""

    token_id: int
    begin: int
    end: int
    num_content: int = 0
    """How many characters of its text are content."""
    is_reasoning: bool = False
    is_stop: bool = False
    """Whether it is the stop token that ended the output."""


class ParsingReceiver:
    """Passes a request's parsed output to another receiver."""

    def __init__(self, receiver: RequestReceiver, choices: "Sequence[ParsedChoice]") -> None:
        """``choices`` has one for each choice, in order. Deltas must have ``text_lengths``."""
        self._receiver = receiver
        self._choices = choices
        self._had_output = False
        self._ends_with_calls = False
        """Whether the last choice that ended did."""

    def accepted(self, accepted: pb.Accepted) -> None:
        self._receiver.accepted(accepted)

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk, form: OutputForm) -> None:
        self._receiver.prompt_logprobs(ref, part, form)

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """Parses ``delta``, unless it is parsed already. Sends nothing while all of it is held back."""
        parsed = delta if isinstance(delta, ParsedSequenceDelta) else self._choices[delta.choice].parse(delta)
        if parsed is None:
            return
        if parsed.end is not None:
            self._ends_with_calls = parsed.ends_with_calls
        self._receiver.delta(ref, parsed, form, at_once or not self._had_output)
        self._had_output = True

    def injected(self, injected: pb.Injected) -> None:
        """Passes it on. The parsers continue: output that one holds back follows later."""
        self._receiver.injected(injected)

    def finished(self, finished: pb.Finished) -> None:
        finished.usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        if finished.reason == pb.FINISH_REASON_STOP and self._ends_with_calls:
            finished.reason = pb.FINISH_REASON_TOOL_CALLS
        self._receiver.finished(finished)

    def fail(self, error: Exception) -> None:
        self._receiver.fail(error)


class ParsedChoice:
    """The output of one choice and its parser."""

    def __init__(self, choice: int, parser: AnswerParser) -> None:
        self.num_reasoning_tokens = 0
        self._choice = choice
        self._parser = parser
        self._tokens: list[_Token] = []
        """The tokens that are held back, the oldest first."""
        self._logprobs: TokenLogprobs | None = None
        """The log-probabilities of these tokens."""
        self._num_read = 0
        """The number of characters of the model's text so far."""
        self._num_content = 0
        self._has_calls = False
        self._has_incomplete_call = False
        self._was_reasoning = False
        """Whether the last token that was released is reasoning."""

    def parse(self, delta: SequenceDelta) -> ParsedSequenceDelta | None:
        """Returns the output that ``delta`` adds; None if all of it is held back."""
        self._hold(delta)
        piece = self._parser.feed(delta.text)
        if delta.end is not None:
            piece += self._parser.end()
        for token, num_chars in _overlaps(self._tokens, piece.spans):
            token.num_content += num_chars
        for token, _ in _overlaps(self._tokens, piece.reasoning_spans):
            token.is_reasoning = True
        if not piece and delta.end is None:
            return None
        calls = tuple(replace(call, at=self._num_content + call.at) for call in piece.calls)
        self._num_content += len(piece.content)
        self._has_calls = self._has_calls or bool(calls)
        self._has_incomplete_call = self._has_incomplete_call or any(call.breaks_off for call in calls)
        parsed = self._released(None if delta.end is not None else self._num_read - piece.num_held)
        parsed.text, parsed.reasoning, parsed.calls, parsed.end = piece.content, piece.reasoning, calls, delta.end
        if delta.end is not None:
            is_stop = delta.end.reason is EngineFinishReason.STOP
            # Callers run calls for this reason, so every call must be complete.
            parsed.ends_with_calls = is_stop and self._has_calls and not self._has_incomplete_call
        return parsed

    def _hold(self, delta: SequenceDelta) -> None:
        """Holds the tokens of ``delta``. The last ones may be of a stop string, which is not in the text."""
        assert delta.text_lengths is not None, "the request measures its text"
        at, after = self._num_read, self._num_read + len(delta.text)
        for token_id, length in zip(delta.token_ids, delta.text_lengths, strict=True):
            begin = min(at, after)
            at += length
            self._tokens.append(_Token(token_id, begin, min(at, after)))
        self._num_read = after
        if delta.end is not None and delta.end.stop_token_id is not None:
            self._tokens[-1].is_stop = True
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = delta.logprobs
            else:
                self._logprobs.extend(delta.logprobs)

    def _released(self, known: int | None) -> ParsedSequenceDelta:
        """Returns the oldest tokens, whose text ends at position ``known`` or before; None: all tokens."""
        number = len(self._tokens)
        if known is not None:
            number = next((at for at, token in enumerate(self._tokens) if token.end > known), number)
        released, self._tokens = self._tokens[:number], self._tokens[number:]
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = logprobs.part(number, len(logprobs.chosen))
            logprobs = logprobs.part(0, number)
        for token in released:
            # A token without text of its own belongs to the character that the one before it begins.
            if token.end > token.begin:
                self._was_reasoning = token.is_reasoning
            self.num_reasoning_tokens += self._was_reasoning and not token.is_stop
        ids, lengths = [token.token_id for token in released], [token.num_content for token in released]
        return ParsedSequenceDelta(self._choice, ids, "", logprobs, text_lengths=lengths)


def _overlaps(tokens: Sequence[_Token], spans: Spans) -> Iterator[tuple[_Token, int]]:
    """Yields the tokens whose text is partly in one of the spans, with the number of characters. Both are in order."""
    at = 0
    for begin, end in spans:
        while at < len(tokens) and tokens[at].begin < end:
            token = tokens[at]
            if (number := min(token.end, end) - max(token.begin, begin)) > 0:
                yield token, number
            if token.end > end:
                break  # the next span may begin in it
            at += 1
