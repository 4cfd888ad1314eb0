"""Measures how much of the held-out documents also occurs in the training documents: the share of their runs of 13
words that a training document contains.

The model is not involved. Typical common passages are options that several manual pages describe, and the descriptions
of related packages.

Examples:
    python overlap.py
    python overlap.py --work /data/demo-train --words 8
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from penstock.models.train_demo.prepare import DEFAULT_WORK


def runs(path: Path, words: int) -> Iterator[tuple[str, int]]:
    """Yields (domain, hash) for every run of `words` words of a .jsonl file's documents."""
    with path.open() as lines:
        for line in lines:
            document = json.loads(line)
            split = document["text"].split()
            for start in range(len(split) - words + 1):
                yield document["domain"], hash(" ".join(split[start : start + words]))


def main() -> None:
    """Prints the share by domain and overall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--words", type=int, default=13, help="words in a run (default: 13)")
    args = parser.parse_args()
    heldout = list(runs(args.work / "heldout.jsonl", args.words))
    wanted = {digest for _, digest in heldout}
    common = {digest for _, digest in runs(args.work / "train.jsonl", args.words) if digest in wanted}
    total, shared = Counter[str](), Counter[str]()
    for domain, digest in heldout:
        total.update((domain, "all"))
        if digest in common:
            shared.update((domain, "all"))
    for name, count in total.most_common():
        print(f"{name:18} {count:8,} runs, {100 * shared[name] / count:5.1f} % in common")


if __name__ == "__main__":
    main()
