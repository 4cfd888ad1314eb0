"""The parts of a message before it is built, and their encoded sizes. Knows nothing about streams."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import penstock.v1 as pb
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import PromptLogprobsChunk, SequenceDelta
from penstock.service.config.text_size import utf8_bytes
from penstock.service.streaming.parsed_delta import (
    ParsedSequenceDelta,
    call_parts,
    parsed_bytes,
    reasoning_parts,
)

MAX_MESSAGE_BYTES = 64 << 10
PART_BYTES = 48
"""An upper bound on a part's size besides its text, ids and numbers."""
_ID_BYTES = 3
"""The maximum size of an id below 2**21."""
_FLOAT_BYTES = 4
_LENGTH_BYTES = 2
"""The maximum size of a text length: fewer than 2**14 characters start in a token."""
_TEXT_BYTES = 4
"""An upper bound on the encoding overhead of a token's text."""
_CHAR_BYTES = 4
"""The maximum size of a character in UTF-8."""
MAX_PART_BYTES = MAX_MESSAGE_BYTES - 1024
"""The maximum size of a part: it fits in an empty message."""
MAX_TOKEN_BYTES = 16 << 10
"""The maximum size of one token's log-probabilities with texts: it fits in each part of a split delta."""
ENTRY_BYTES = _TEXT_BYTES + _ID_BYTES + _FLOAT_BYTES
"""An upper bound on the size of a log-probability without its token's bytes."""


class OutputForm(NamedTuple):
    """The parts of the output that a request receives."""

    text: bool
    token_ids: bool
    parsed: bool = False
    """Whether deltas may have reasoning and calls."""
    token_text: Callable[[int], bytes] | None = None
    """Returns the text of a token, if log-probabilities include it."""


class PendingMessage:
    """The contents of a future message, in the order of arrival. The deltas of a choice are joined."""

    __slots__ = (
        "accepted",
        "deltas",
        "finished",
        "frames_refused",
        "heartbeat",
        "injected",
        "num_bytes",
        "prompt_logprobs",
    )

    def __init__(self) -> None:
        self.accepted: list[pb.Accepted] = []
        self.prompt_logprobs: list[tuple[int, OutputForm, PromptLogprobsChunk]] = []
        self.deltas: dict[tuple[int, int], tuple[OutputForm, list[SequenceDelta]]] = {}
        """Deltas by ref and choice."""
        self.finished: list[pb.Finished] = []
        self.frames_refused: list[pb.FrameRefused] = []
        self.injected: list[pb.Injected] = []
        self.heartbeat: pb.Heartbeat | None = None
        self.num_bytes = 0
        """An upper bound on the message's encoded size."""


def delta_bytes(delta: SequenceDelta, form: OutputForm) -> int:
    """Returns an upper bound on a delta's encoded size; 0 if none of its parts are in ``form``."""
    num_bytes = 0
    if form.text and delta.text:
        num_bytes = utf8_bytes(delta.text)
    if form.token_ids:
        num_bytes += _ID_BYTES * len(delta.token_ids)
    if delta.logprobs is not None:
        num_bytes += logprobs_bytes(delta.logprobs, delta.token_ids, form)
        num_bytes += _LENGTH_BYTES * len(delta.text_lengths or ())
    if delta.end is not None:
        num_bytes += PART_BYTES + utf8_bytes(delta.end.stop or "")
    if form.parsed:
        num_bytes += parsed_bytes(delta)
    return num_bytes and num_bytes + PART_BYTES


def logprobs_bytes(logprobs: TokenLogprobs, token_ids: Sequence[int], form: OutputForm) -> int:
    """Returns an upper bound on the encoded size of the log-probabilities of these tokens."""
    num_bytes = _FLOAT_BYTES * len(logprobs.chosen) + (_ID_BYTES + _FLOAT_BYTES) * len(logprobs.top)
    if form.token_text is not None:
        num_bytes += sum(_TEXT_BYTES + len(form.token_text(each)) for each in chain(token_ids, logprobs.top_token_ids))
    return num_bytes


def split(part: PromptLogprobsChunk, form: OutputForm) -> list[PromptLogprobsChunk]:
    """Splits ``part`` into parts of at most half a message."""
    most_bytes = MAX_PART_BYTES // 2 - PART_BYTES
    if logprobs_bytes(part.logprobs, part.token_ids, form) <= most_bytes:
        return [part]
    sizes = _logprob_sizes(part.logprobs, part.token_ids, form)
    return [
        PromptLogprobsChunk(part.start + first, part.token_ids[first:end], part.logprobs.part(first, end))
        for first, end in _runs(sizes, most_bytes)
    ]


def _logprob_sizes(logprobs: TokenLogprobs, token_ids: Sequence[int], form: OutputForm) -> list[int]:
    """Returns an upper bound on the encoded size of the log-probabilities of each token."""
    k = logprobs.num_top
    sizes = [_FLOAT_BYTES + k * (_ID_BYTES + _FLOAT_BYTES)] * len(token_ids)
    if form.token_text is not None:
        for at, token_id in enumerate(token_ids):
            top = logprobs.top_token_ids[at * k : (at + 1) * k]
            sizes[at] += sum(_TEXT_BYTES + len(form.token_text(each)) for each in (token_id, *top))
    return sizes


def _runs(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yields the first index and the end of each run of sizes whose sum is at most ``most``. There is at least one run,
    and each has at least one size."""
    first = total = 0
    for at, size in enumerate(sizes):
        if total + size > most and at > first:
            yield first, at
            first, total = at, 0
        total += size
    yield first, len(sizes)


def split_delta(delta: SequenceDelta, form: OutputForm) -> list[SequenceDelta]:
    """Splits ``delta`` into parts of at most ``MAX_PART_BYTES``: first its tokens, in order, with the text in the last
    of these parts. The rest of a long text follows in separate parts. Reasoning comes before all of these, and calls
    after them. The last part has the end."""
    most_bytes = MAX_PART_BYTES // 3
    token_bytes = _ID_BYTES if form.token_ids else 0
    if delta.logprobs is None:
        sizes = [token_bytes] * len(delta.token_ids)
    else:
        token_bytes += _LENGTH_BYTES
        sizes = [token_bytes + size for size in _logprob_sizes(delta.logprobs, delta.token_ids, form)]
    num_chars = most_bytes // _CHAR_BYTES
    parsed = delta if isinstance(delta, ParsedSequenceDelta) else None
    parts: list[SequenceDelta] = [] if parsed is None else [*reasoning_parts(parsed, num_chars)]
    parts += [
        SequenceDelta(
            delta.choice,
            delta.token_ids[first:end],
            "",
            None if delta.logprobs is None else delta.logprobs.part(first, end),
            text_lengths=None if delta.text_lengths is None else delta.text_lengths[first:end],
        )
        for first, end in _runs(sizes, most_bytes)
    ]
    if form.text:
        parts[-1].text = delta.text[:num_chars]
        parts += [
            SequenceDelta(delta.choice, [], delta.text[first : first + num_chars])
            for first in range(num_chars, len(delta.text), num_chars)
        ]
    if parsed is not None:
        parts += call_parts(parsed, num_chars)
        if parsed.end is not None:
            parts.append(ParsedSequenceDelta(delta.choice, [], "", ends_with_calls=parsed.ends_with_calls))
    parts[-1].end = delta.end
    return parts
