"""Divides large answers into portions, so that each blocks the event loop only for milliseconds."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.clients.events import Delta, PromptLogprobs
from penstock.clients.gateway.upstream.upstream_request import Arrival

_MAX_ENTRIES = 2048
"""The limit of tokens and alternatives in a portion: some milliseconds of work."""
_CHARS_PER_ENTRY = 16
"""How many characters cost a parser as much as one entry."""
_MAX_MEMBERS = 64
"""How many members of a list of tokens, each with its alternatives, are encoded at once."""
_MAX_BYTES = 1 << 18
_encode = msgspec.json.encode


def portions(arrivals: Sequence[Arrival]) -> Iterator[Sequence[Arrival]]:
    """Divides events into portions, at least one, in order; the caller lets other tasks run in between. Large
    log-probabilities of a prompt are split."""
    portion: list[Arrival] = []
    num_entries = 0
    for index, event in arrivals:
        for part in _cut(event) if isinstance(event, PromptLogprobs) else (event,):
            size = len(part.text) // _CHARS_PER_ENTRY if isinstance(part, Delta) else 0
            if isinstance(part, PromptLogprobs | Delta) and part.logprobs is not None:
                size += len(part.logprobs.chosen) + len(part.logprobs.top)
            if portion and num_entries + size > _MAX_ENTRIES:
                yield portion
                portion, num_entries = [], 0
            portion.append((index, part))
            num_entries += size
    yield portion


async def encoded(answer: dict[str, Any]) -> bytes:
    """Encodes an answer as JSON; other tasks run in between."""
    parts: list[bytes] = []
    num_bytes = 0
    for part in _parts(answer):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_BYTES:
            await asyncio.sleep(0)
            num_bytes = 0
    return b"".join(parts)


def _cut(event: PromptLogprobs) -> Iterator[PromptLogprobs]:
    whole = event.logprobs
    step = max(1, _MAX_ENTRIES // (whole.num_top + 1))
    for begin in range(0, len(whole.chosen), step):
        yield PromptLogprobs(event.start + begin, whole.part(begin, begin + step))


def _parts(value: object, name: str = "") -> Iterator[bytes]:
    """Yields the parts of a value. Choices are few and large; other lists have many small members."""
    if isinstance(value, dict) and value:
        mark = b"{"
        for key, member in value.items():
            yield mark + _encode(key) + b":"
            yield from _parts(member, key)
            mark = b","
        yield b"}"
    elif isinstance(value, list) and name == "choices" and value:
        mark = b"["
        for member in value:
            yield mark
            yield from _parts(member)
            mark = b","
        yield b"]"
    elif isinstance(value, list) and len(value) > _MAX_MEMBERS:
        mark = b"["
        for begin in range(0, len(value), _MAX_MEMBERS):
            yield mark + _encode(value[begin : begin + _MAX_MEMBERS])[1:-1]
            mark = b","
        yield b"]"
    else:
        yield _encode(value)
