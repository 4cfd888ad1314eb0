"""The first token after the commit of a prompt that arrived in pieces, and what prompts that are never committed cost.

A prompt of 8,000 tokens arrives in 40 pieces over 4 s. Its first token after `commit` is compared with that of the same
kind of prompt sent whole at that moment, by turns. Then 200 open prompts are left alone, and the speed of eight streams
is measured before them and after their time to live, by turns. All of it real: `penstock serve` with the demo model,
and its Python client.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

from penstock.clients import AsyncClient, Delta, Finished, RequestFailed, RequestStream
from penstock.service.app.embedded import local_service

MIN_SPEEDUP = 5.0
MAX_COST = 0.05
TEXT = "the river runs under old stone bridges while green boats wait for rain and birds cross bright fields"
WORDS = TEXT.split()
TTL_S = 3.0
NUM_STREAMS = 8
STREAM_TOKENS = 200
SPEEDS = 3
"""The number of measurements whose median is a speed."""


async def sized_text(client: AsyncClient, num_tokens: int, seed: int) -> str:
    """A text of about this many tokens, which has no block in common with that of another seed."""
    rng = random.Random(seed)
    words = [str(rng.randrange(10**9)), *(rng.choice(WORDS) for _ in range(num_tokens))]
    num_found = len(await client.tokenize(" ".join(words)))
    return " ".join(words[: len(words) * num_tokens // num_found])


def pieces_of(text: str, number: int) -> list[str]:
    """Cuts a text into parts of the same length."""
    size = -(-len(text) // number)
    return [text[at : at + size] for at in range(0, len(text), size)]


async def first_token_ms(request: RequestStream, begin: float) -> tuple[float, int]:
    """The time from ``begin`` to the first token, and the number of prompt tokens that were cached."""
    found_ms = 0.0
    async for event in request:
        if isinstance(event, Delta) and not found_ms:
            found_ms = (time.perf_counter() - begin) * 1000
        elif isinstance(event, Finished):
            return found_ms, event.usage.prompt_tokens - event.usage.cached_tokens
    raise AssertionError("a request ends with Finished")


async def in_pieces(client: AsyncClient, pieces: Sequence[str], over_s: float) -> tuple[float, int]:
    """A prompt that arrives in pieces, evenly over a time."""
    request = client.open_prompt(max_tokens=4, ignore_eos=True)
    start = time.perf_counter()
    for number, piece in enumerate(pieces, 1):
        request.append(piece)
        await asyncio.sleep(max(0.0, start + over_s * number / len(pieces) - time.perf_counter()))
    begin = time.perf_counter()
    request.commit()
    return await first_token_ms(request, begin)


async def at_once(client: AsyncClient, text: str) -> tuple[float, int]:
    """The same as one message."""
    begin = time.perf_counter()
    return await first_token_ms(client.generate(text, max_tokens=4, ignore_eos=True), begin)


async def stream_speed(client: AsyncClient, seed: int) -> float:
    """Output tokens per second of some streams together."""
    begin = time.perf_counter()
    prompts = [[(seed * 7919 + number * 31 + at) % 4000 for at in range(32)] for number in range(NUM_STREAMS)]
    await asyncio.gather(
        *(client.complete(prompt, max_tokens=STREAM_TOKENS, ignore_eos=True, temperature=0) for prompt in prompts)
    )
    return NUM_STREAMS * STREAM_TOKENS / (time.perf_counter() - begin)


async def abandoned(client: AsyncClient, number: int, seed: int) -> None:
    """Opens prompts, sends a little of each, and waits until all have ended."""
    requests = [client.open_prompt(max_tokens=4) for _ in range(number)]
    for at, request in enumerate(requests):
        request.append(f"{seed} {at} " + " ".join(WORDS * 8))

    async def end(request: RequestStream) -> None:
        with suppress(RequestFailed):  # the time to live has passed
            await request.completion()

    await asyncio.gather(*map(end, requests))


async def measure(target: str, arguments: argparse.Namespace) -> None:
    """Prints both parts."""
    async with AsyncClient(target) as client:
        times: dict[str, list[float]] = {"in pieces": [], "at once": []}
        computed: dict[str, list[int]] = {"in pieces": [], "at once": []}
        for turn in range(arguments.rounds):
            text = await sized_text(client, arguments.tokens, 2 * turn)
            other = await sized_text(client, arguments.tokens, 2 * turn + 1)
            for name, found in (
                ("in pieces", await in_pieces(client, pieces_of(text, arguments.pieces), arguments.seconds)),
                ("at once", await at_once(client, other)),
            ):
                times[name].append(found[0])
                computed[name].append(found[1])
        print(f"a prompt of {arguments.tokens:,} tokens, in {arguments.pieces} pieces over {arguments.seconds:g} s")
        print(f"{'':>12}{'computed after':>16}{'first token, p50 ms':>22}   all, ms")
        for name, found_ms in times.items():
            each = " ".join(f"{value:.0f}" for value in found_ms)
            print(f"{name:>12}{max(computed[name]):>16,}{statistics.median(found_ms):>22.1f}   {each}")
        speedup = statistics.median(times["at once"]) / statistics.median(times["in pieces"])
        met = "met" if speedup >= MIN_SPEEDUP else "NOT met"
        print(f"first token {speedup:.1f} times sooner; target: {MIN_SPEEDUP:g} times: {met}")
        seeds = itertools.count()
        await stream_speed(client, next(seeds))

        async def speed() -> float:
            return statistics.median([await stream_speed(client, next(seeds)) for _ in range(SPEEDS)])

        ratios = []
        for turn in range(arguments.rounds):
            before = await speed()
            await abandoned(client, arguments.abandoned, turn)
            ratios.append(await speed() / before)
        cost = 1 - statistics.median(ratios)
        met = "met" if cost <= MAX_COST else "NOT met"
        print(
            f"{NUM_STREAMS} streams after {arguments.abandoned} open prompts have expired: "
            f"{statistics.median(ratios):.3f} of the speed before ({min(ratios):.3f} to {max(ratios):.3f}); target: at "
            f"least {1 - MAX_COST:g}: {met}"
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--pieces", type=int, default=40, help="its pieces (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="the time in which they arrive (default %(default)s)"
    )
    parser.add_argument("--abandoned", type=int, default=200, help="prompts that stay open (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default %(default)s)")
    arguments = parser.parse_args()
    with local_service("demo", max_model_len=16_384, open_prompt_ttl=TTL_S) as target:
        asyncio.run(measure(target, arguments))


if __name__ == "__main__":
    main()
