"""What a token costs the event loop on its way to text, by the demo model's tokenizer, with and without stop strings.

Prints the best of several runs over a long text, in microseconds a token; beside it, what it would cost to decode the
whole text anew after each token.
"""

import argparse
import time
from collections.abc import Callable

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.text.detokenizer import text_states
from penstock.service.text.tokenizer import Tokenizer

TEXT = "A penstock holds back, meters and releases a flow under pressure; naïve users, 你好, call it a pipe.\n"
STOPS = {
    "no stop strings": (),
    "one": ("\n\n",),
    "four": ("</s>", "\n\nUser:", "<|im_end|>", "pipes"),
    "64, all alike": tuple("a" * length + "!" for length in range(1, 65)),
    "64 of 1,000": tuple("A penstock holds" * 62 + chr(ord("A") + number) for number in range(64)),
}
RUNS = 5


def microseconds(work: Callable[[], object], num_tokens: int) -> float:
    """The best of several runs."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / num_tokens


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of the text (default: %(default)s)")
    num_tokens = parser.parse_args().tokens
    tokenizer = Tokenizer(resolve_model(DEMO))
    sentence = tokenizer.encode(TEXT)
    token_ids = (sentence * (num_tokens // len(sentence) + 1))[:num_tokens]
    print(f"text of {num_tokens:,} tokens, one after the other")
    print(f"{'stop strings':<18} {'us a token':>10}")
    for name, stops in STOPS.items():

        def feed(stops: tuple[str, ...] = stops) -> None:
            state = text_states(tokenizer, stops)()
            for token_id in token_ids:
                state.feed(token_id)

        print(f"{name:<18} {microseconds(feed, num_tokens):>10.2f}")
    whole = microseconds(lambda: tokenizer.decode(token_ids), 1)
    print(f"{'decoded anew':<18} {whole:>10.0f}")


if __name__ == "__main__":
    main()
