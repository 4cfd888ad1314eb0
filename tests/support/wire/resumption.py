"""Requests that continue another one, with whatever its caller may claim to have received."""

import random
from typing import Any

from wire.broken_bytes import flip

import penstock.v1 as pb


async def messages_of(service: Any, start: pb.GenerationStart) -> list[pb.GenerateOneResponse]:
    """All that a service sends for a request."""
    return [message async for message in service.generation.GenerateOne(pb.GenerateOneRequest(start=start))]


async def ticket_of(service: Any, start: pb.GenerationStart) -> bytes:
    """The ticket that a service issues for a request."""
    messages = await messages_of(service, start)
    tickets = [message.accepted.resume_ticket for message in messages if message.HasField("accepted")]
    ticket: bytes = tickets[0]
    return ticket


def resume_randomly(rng: random.Random, start: pb.GenerationStart, ticket: bytes, vocab_size: int) -> None:
    """Makes a start the rest of a request that had any tokens, and of which any part was received. Some tickets are
    broken, and some tokens are none."""
    start.resume_from.ticket = ticket if rng.random() < 0.9 else flip(rng, ticket)
    choice = start.resume_from.choices.add(has_ended=rng.random() < 0.1)
    most = rng.choice((200, vocab_size, vocab_size + 1))
    choice.token_ids.extend(rng.choices(range(most), k=rng.choice((0, 3, 99))))
    for count in ("text_chars", "reasoning_chars", "tool_calls", "argument_chars"):
        setattr(choice, count, rng.choice((0, 1, len(choice.token_ids), 2**32 - 1)))
