"""A turn by continue_from after 2,000 tokens of context, when other traffic has filled the KV cache twice over.

With the context's KV retained and without, by turns: how many tokens of the prompt are computed, and when the first
token comes, by the client's clock. All of it real: `penstock serve` with the demo model, and its Python client.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.clients import AsyncClient, Delta, Finished
from penstock.service.app.embedded import local_service

MIN_SPEEDUP = 5.0
MAX_OLD_TOKENS = 16
VOCAB = 4000
ANSWER_TOKENS = 16
OTHERS_TOKENS = 1024
OTHERS_AT_ONCE = 4


@dataclass
class Turn:
    """What one turn cost."""

    num_computed: int
    """Tokens of its prompt that the cache did not have."""
    first_token_ms: float


def new_ids(numbers: Iterator[int], num_tokens: int) -> list[int]:
    """A prompt that has no block in common with another, for fewer numbers than VOCAB."""
    number = next(numbers)
    return [(number * 7919 + i * 31) % VOCAB for i in range(num_tokens)]


async def measure(target: str, context_tokens: int, new_tokens: int, rounds: int) -> dict[bool, list[Turn]]:
    """The turns with retention and without."""
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    numbers = itertools.count()
    async with AsyncClient(target) as client:
        limits = (await client.model()).limits
        num_others = -(-2 * limits.num_kv_blocks * limits.kv_block_size // OTHERS_TOKENS)
        for _, retained in itertools.product(range(rounds), (True, False)):
            prompt = new_ids(numbers, context_tokens - ANSWER_TOKENS)
            retain_ms = 600_000 if retained else 0
            first = await client.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, retain_ms=retain_ms)
            for _ in range(-(-num_others // OTHERS_AT_ONCE)):
                others = [new_ids(numbers, OTHERS_TOKENS) for _ in range(OTHERS_AT_ONCE)]
                await asyncio.gather(*(client.complete(other, max_tokens=1) for other in others))
            turns[retained].append(await take_turn(client, first.request_id, new_ids(numbers, new_tokens)))
    return turns


async def take_turn(client: AsyncClient, continue_from: str, new: list[int]) -> Turn:
    """One turn, alone."""
    begin = time.perf_counter()
    first_token_ms = 0.0
    options = {"continue_from": continue_from, "retain_ms": 0}
    async for event in client.generate(new, max_tokens=4, ignore_eos=True, **options):  # type: ignore[arg-type]
        if isinstance(event, Delta) and not first_token_ms:
            first_token_ms = (time.perf_counter() - begin) * 1000
        elif isinstance(event, Finished):
            return Turn(event.usage.prompt_tokens - event.usage.cached_tokens, first_token_ms)
    raise AssertionError("a request ends with Finished")


def main() -> None:
    """Prints both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2000, help="tokens of the context (default %(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens of the turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default %(default)s)")
    parser.add_argument("--kv-cache", default="24M", help="the KV cache (default %(default)s)")
    args = parser.parse_args()
    with local_service("demo", max_model_len=4096, kv_cache_memory_bytes=args.kv_cache) as target:
        turns = asyncio.run(measure(target, args.context, args.new, args.rounds))
    print(
        f"a turn of {args.new} tokens after {args.context:,}, others filled the cache twice over; {args.rounds} of each"
    )
    print(f"{'':>16}{'computed':>12}{'first token, p50 ms':>22}{'all, ms':>30}")
    p50 = {}
    for retained, measured in turns.items():
        p50[retained] = statistics.median(turn.first_token_ms for turn in measured)
        computed = max(turn.num_computed for turn in measured)
        each = " ".join(f"{turn.first_token_ms:.1f}" for turn in measured)
        print(f"{'retained' if retained else 'not retained':>16}{computed:>12,}{p50[retained]:>22.1f}{each:>30}")
    speedup = p50[False] / p50[True]
    old = max(turn.num_computed for turn in turns[True]) - args.new
    good = speedup >= MIN_SPEEDUP and old <= MAX_OLD_TOKENS
    print(
        f"old tokens computed: {old}; first token {speedup:.1f} times sooner; target: at most {MAX_OLD_TOKENS}, and "
        f"{MIN_SPEEDUP:.0f} times: {'met' if good else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
