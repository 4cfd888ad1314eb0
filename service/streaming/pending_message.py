"""The parts of one message, before it is one, and what they take on the wire. Knows no stream."""

from typing import NamedTuple

from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import PromptLogprobsChunk, SequenceDelta
from penstock.service.config.text_size import utf8_bytes
from penstock.v1 import generation_pb2 as pb

MAX_MESSAGE_BYTES = 64 << 10
PART_BYTES = 48
"""More than a part takes besides its text, ids and numbers."""
_ID_BYTES = 3
"""Ids below 2**21 take no more."""
_FLOAT_BYTES = 4
_LENGTH_BYTES = 2
"""A token begins fewer than 2**14 characters."""
_CHAR_BYTES = 4
"""No character takes more in UTF-8."""
MAX_PART_BYTES = MAX_MESSAGE_BYTES - 1024
"""What an empty message takes."""


class OutputForm(NamedTuple):
    """Which parts of the output a request wants."""

    text: bool
    token_ids: bool


class PendingMessage:
    """What one message will hold, in the order in which it came; the deltas of a choice become one."""

    __slots__ = ("accepted", "deltas", "finished", "heartbeat", "num_bytes", "prompt_logprobs", "update_refused")

    def __init__(self) -> None:
        self.accepted: list[pb.Accepted] = []
        self.prompt_logprobs: list[tuple[int, PromptLogprobsChunk]] = []
        self.deltas: dict[tuple[int, int], tuple[OutputForm, list[SequenceDelta]]] = {}
        """By ref and choice."""
        self.finished: list[pb.Finished] = []
        self.update_refused: list[pb.UpdateRefused] = []
        self.heartbeat: pb.Heartbeat | None = None
        self.num_bytes = 0
        """At least what the message takes on the wire."""

    def has_room(self, num_bytes: int, most: int = MAX_PART_BYTES) -> bool:
        """Whether a part of so many bytes may still go in, where a message may have ``most``."""
        return self.num_bytes + num_bytes <= most


def delta_bytes(delta: SequenceDelta, form: OutputForm) -> int:
    """What a delta takes at most; 0 if there is nothing in it that its request wants."""
    num_bytes = 0
    if form.text and delta.text:
        num_bytes = utf8_bytes(delta.text)
    if form.token_ids:
        num_bytes += _ID_BYTES * len(delta.token_ids)
    if delta.logprobs is not None:
        num_bytes += logprobs_bytes(delta.logprobs) + _LENGTH_BYTES * len(delta.text_lengths or ())
    if delta.end is not None:
        num_bytes += PART_BYTES + utf8_bytes(delta.end.stop or "")
    return num_bytes and num_bytes + PART_BYTES


def logprobs_bytes(logprobs: TokenLogprobs) -> int:
    """What log-probabilities take at most."""
    return _FLOAT_BYTES * len(logprobs.chosen) + (_ID_BYTES + _FLOAT_BYTES) * len(logprobs.top)


def split(part: PromptLogprobsChunk) -> list[PromptLogprobsChunk]:
    """The same in parts, of which two go into a message."""
    num_top = part.logprobs.num_top
    most = (MAX_PART_BYTES // 2 - PART_BYTES) // (_FLOAT_BYTES + num_top * (_ID_BYTES + _FLOAT_BYTES))
    num_tokens = len(part.logprobs.chosen)
    if num_tokens <= most:
        return [part]
    return [
        PromptLogprobsChunk(
            start=part.start + first,
            logprobs=_entries(part.logprobs, first, first + most),
        )
        for first in range(0, num_tokens, most)
    ]


def split_delta(delta: SequenceDelta, form: OutputForm) -> list[SequenceDelta]:
    """The same in parts, none above ``MAX_PART_BYTES``: its tokens, in order, and with the last of them the text. A
    long text goes on in parts of its own; the last part has the end."""
    most_bytes = MAX_PART_BYTES // 3
    token_bytes = _ID_BYTES if form.token_ids else 0
    if delta.logprobs is not None:
        token_bytes += _LENGTH_BYTES + _FLOAT_BYTES + delta.logprobs.num_top * (_ID_BYTES + _FLOAT_BYTES)
    most = most_bytes // token_bytes if token_bytes else max(len(delta.token_ids), 1)
    parts = [
        SequenceDelta(
            delta.choice,
            delta.token_ids[first : first + most],
            "",
            None if delta.logprobs is None else _entries(delta.logprobs, first, first + most),
            text_lengths=None if delta.text_lengths is None else delta.text_lengths[first : first + most],
        )
        for first in range(0, max(len(delta.token_ids), 1), most)
    ]
    if form.text:
        num_chars = most_bytes // _CHAR_BYTES
        parts[-1].text = delta.text[:num_chars]
        parts += [
            SequenceDelta(delta.choice, [], delta.text[first : first + num_chars])
            for first in range(num_chars, len(delta.text), num_chars)
        ]
    parts[-1].end = delta.end
    return parts


def _entries(logprobs: TokenLogprobs, first: int, end: int) -> TokenLogprobs:
    """Those of the tokens from ``first`` to before ``end``."""
    num_top = logprobs.num_top
    top = slice(first * num_top, end * num_top)
    return TokenLogprobs(num_top, logprobs.chosen[first:end], logprobs.top_token_ids[top], logprobs.top[top])
