"""Measures a demo model's bits per byte on the held-out documents, overall and by domain.

bits per byte = sum of -log2 p(token) / number of UTF-8 bytes of text. The sum includes special tokens and the end of
the document; the bytes do not, so the result is slightly too high rather than too low. Each document is read in
windows of --length tokens without overlap, and its first token is predicted from <|endoftext|>.

Examples:
    python evaluate.py
    python evaluate.py --model models/demo --length 4096 --json
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from penstock.models.train_demo.export import read_model
from penstock.models.train_demo.network import Decoder, rotary_tables
from penstock.models.train_demo.prepare import DEFAULT_WORK
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER, END_OF_TEXT, SPECIAL_TOKENS, special_id

BATCH_TOKENS = 2048


@dataclass
class EvaluationSums:
    """Sums over documents: -log p in nats, bytes of text, and tokens."""

    nats: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(1, self.num_bytes)

    def add_document(self, nats: float, num_bytes: int, num_tokens: int) -> None:
        self.nats += nats
        self.num_bytes += num_bytes
        self.num_tokens += num_tokens


@dataclass(frozen=True)
class Window:
    """At most `length` tokens of a document, preceded by the token before them. `num_bytes` is the document's size in
    its first window and 0 in the others."""

    domain: str
    ids: list[int] = field(repr=False)
    num_bytes: int


def windows(path: Path, tokenizer: Tokenizer, length: int, max_documents: int) -> Iterator[Window]:
    """Yields the windows of a .jsonl file's documents, or of about `max_documents` evenly spaced ones."""
    end = special_id(tokenizer, END_OF_TEXT)
    lines = path.read_text().splitlines()
    for line in lines[:: max(1, len(lines) // max_documents)]:
        document = json.loads(line)
        text = document["text"]
        ids = [end, *tokenizer.encode(text, add_special_tokens=False).ids, end]
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        for start in range(0, len(ids) - 1, length):
            num_bytes = 0 if start else len(text.encode())
            yield Window(document["domain"], ids[start : start + length + 1], num_bytes)


@torch.inference_mode()
def measure(model: Decoder, parts: list[Window], device: str, quiet: bool = False) -> dict[str, EvaluationSums]:
    """Returns the sums by domain, and over all domains as "all"."""
    tallies: defaultdict[str, EvaluationSums] = defaultdict(EvaluationSums)
    ordered = sorted(parts, key=lambda part: len(part.ids))
    length = len(ordered[-1].ids)
    cos, sin = (table.to(device) for table in rotary_tables(model.shape, length))
    with tqdm(total=len(ordered), unit="window", disable=quiet) as bar:
        while ordered:
            widest = len(ordered[-1].ids)
            rows = max(1, BATCH_TOKENS // widest)
            batch, ordered = ordered[-rows:], ordered[:-rows]
            ids = torch.tensor([part.ids + [0] * (widest - len(part.ids)) for part in batch], device=device)
            nats = token_nats(model, ids, cos, sin)
            for row, part in zip(nats, batch, strict=True):
                count = len(part.ids) - 1
                for name in (part.domain, "all"):
                    tallies[name].add_document(float(row[:count].double().sum()), part.num_bytes, count)
            bar.update(len(batch))
    return dict(tallies)


def token_nats(model: Decoder, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns -log p of `ids[:, 1:]`: `(batch, length - 1)` in fp32."""
    count = ids.shape[1] - 1
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(ids[:, :-1], cos[:count], sin[:count])
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return losses.view(-1, count)


def main() -> None:
    """Prints the results for a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a window (default: 2048)")
    parser.add_argument("--max-documents", type=int, default=10**9, help="number of documents (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    parts = list(windows(args.work / "heldout.jsonl", tokenizer, args.length, args.max_documents))
    tallies = measure(read_model(args.model).to(args.device), parts, args.device)
    if args.json:
        print(
            json.dumps({name: vars(tally) | {"bits_per_byte": tally.bits_per_byte} for name, tally in tallies.items()})
        )
        return
    for name, tally in sorted(tallies.items(), key=lambda item: item[1].num_bytes):
        print(f"{name:18} {tally.num_bytes:9,} bytes {tally.num_tokens:8,} tokens {tally.bits_per_byte:6.3f} bits/byte")


if __name__ == "__main__":
    main()
