"""Measures how many drafts are right, for the demo model's draft model (train_draft.py) and its EAGLE-3 head.

`penstock generate` continues prompts from held-out documents (their first 64 tokens) and chats (up to the first reply),
once greedily and once at temperature 1. For every prefix of an output, a drafter then drafts the k tokens that a step
would request, greedily or with the noise with which the output was sampled. The result is the mean number of right
tokens before the first wrong one, over steps that each begin where the previous one ended; a step yields one token
more. The last rows are for the demo model itself as the drafter: all of its drafts are right, except for rounding.

Examples:
    python evaluate_drafts.py
    python evaluate_drafts.py --prompts 40 --draft /data/draft --eagle3 /data/eagle3
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.models.train_demo.continuations import answer
from penstock.models.train_demo.eagle3 import Head, target_states, unrolled
from penstock.models.train_demo.export import read_head, read_model
from penstock.models.train_demo.network import Decoder, rotary_tables
from penstock.models.train_demo.prepare import DEFAULT_WORK
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER, VOCAB_SIZE

PROMPT_TOKENS, NEW_TOKENS, MAX_DRAFTS = 64, 256, 8
COUNTS = range(1, MAX_DRAFTS + 1)
ASSISTANT = "<|im_start|>assistant\n"


@dataclass
class WrittenText:
    """An output of the demo model after a prompt."""

    kind: str
    """The source of the prompt: documents or chats."""
    ids: Tensor
    """The token ids of prompt and output, (length,)."""
    start: int
    """The index of the first output token."""
    seed: int | None
    """The seed for sampling at temperature 1; None: greedy."""

    @cached_property
    def noise(self) -> Tensor:
        """The noise that is added to the logits at each position, `(length + MAX_DRAFTS + 2, VOCAB_SIZE)`. It is zero
        outside the output, and for greedy outputs."""
        length = len(self.ids)
        noise = torch.zeros(length + MAX_DRAFTS + 2, VOCAB_SIZE)
        if self.seed is not None:
            positions = torch.arange(self.start, length)[:, None]
            noise[self.start : length] = keyed_gumbel(torch.tensor(self.seed), positions, torch.arange(VOCAB_SIZE))
        return noise


Drafter = Callable[[WrittenText], Tensor]
"""Returns (length, MAX_DRAFTS) booleans: whether draft s after the first m tokens is right if the earlier ones are, in
row m and column s."""


def prompts(path: Path, tokenizer: Tokenizer, count: int) -> Iterator[tuple[str, list[int]]]:
    """Yields ("documents" or "chats", token ids) of prompts from `count` evenly spaced documents of a .jsonl file."""
    lines = path.read_text().splitlines()
    for line in lines[:: max(1, len(lines) // count)][:count]:
        text = json.loads(line)["text"]
        question, is_chat, _ = text.partition(ASSISTANT)
        ids = tokenizer.encode(question + is_chat, add_special_tokens=False).ids
        yield ("chats", ids) if is_chat else ("documents", ids[:PROMPT_TOKENS])


def model_drafter(model: Decoder) -> Drafter:
    """Returns a drafter for a model with the demo model's tokenizer. A draft is right if the model chooses the output's
    token after the output's prefix."""

    def right(output: WrittenText) -> Tensor:
        length = len(output.ids)
        logits = model(output.ids[None], *rotary_tables(model.shape, length))[0]
        chosen = (logits + output.noise[1 : length + 1]).argmax(-1)
        hits = torch.zeros(length + MAX_DRAFTS, dtype=torch.bool)
        hits[1:length] = chosen[:-1] == output.ids[1:]
        return hits.unfold(0, MAX_DRAFTS, 1)[:length]

    return right


def head_drafter(head: Head, target: Decoder) -> Drafter:
    """Returns a drafter for an EAGLE-3 head."""

    def logits(ids: Tensor) -> Iterator[Tensor]:
        tables = rotary_tables(head.shape, ids.shape[1])
        features, _ = target_states(target, ids, *tables, head.shape.aux_layers)
        return unrolled(head, features, target.model.embed_tokens(ids), *tables, MAX_DRAFTS)

    return unrolled_drafter(logits, head.draft_ids)


def unrolled_drafter(unroll: Callable[[Tensor], Iterator[Tensor]], draft_ids: Tensor) -> Drafter:
    """Returns a drafter for a head of any kind. `unroll` takes ids `(1, n + MAX_DRAFTS)` and yields each draft's logits
    `(1, n, len(draft_ids))`, of which row t of draft s predicts token t + 2 + s."""

    def right(output: WrittenText) -> Tensor:
        length = len(output.ids)
        padded = torch.full((length + MAX_DRAFTS + 2,), -1)
        padded[:length] = output.ids
        noise = output.noise[:, draft_ids]
        found = torch.zeros(length + 2, MAX_DRAFTS, dtype=torch.bool)
        for s, part in enumerate(unroll(padded.clamp(min=0)[None])):  # row t is draft s after t + 2 tokens
            guesses = draft_ids[(part[0, :length] + noise[s + 2 : s + 2 + length]).argmax(-1)]
            found[2:, s] = guesses == padded[s + 2 : s + 2 + length]
        return found[:length]

    return right


def count_accepted(right: Tensor, start: int, num_drafts: int) -> tuple[int, int]:
    """Returns the numbers of accepted drafts and of steps for an output that begins at `start`. `right` is a drafter's
    result."""
    runs = right[:, :num_drafts].int().cumprod(1).sum(1).tolist()
    accepted = steps = 0
    position = start
    while position < len(runs):
        accepted += runs[position]
        steps += 1
        position += runs[position] + 1
    return accepted, steps


@dataclass
class Steps:
    """Sums over outputs, by the number of drafts per step."""

    tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    number: Counter[int] = field(default_factory=Counter)

    def add_predictions(self, right: Tensor, start: int) -> None:
        self.tokens += len(right) - start
        for k in COUNTS:
            accepted, steps = count_accepted(right, start, k)
            self.accepted[k] += accepted
            self.number[k] += steps


def outputs(args: argparse.Namespace) -> list[WrittenText]:
    """Returns the demo model's outputs, greedy and sampled."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    asked = list(prompts(args.work / "heldout.jsonl", tokenizer, args.prompts))
    cases = [(kind, ids, seed) for kind, ids in asked for seed in (None, 0)]
    requests = [
        {"id": number, "prompt_token_ids": ids, "max_tokens": NEW_TOKENS, "seed": number}
        | {"temperature": 0.0 if seed is None else 1.0, "top_p": 1.0}
        for number, (_, ids, seed) in enumerate(cases)
    ]
    answers = answer(args.model, requests, args.work, "drafts")
    return [
        WrittenText(kind, torch.tensor(ids + more), len(ids), None if seed is None else number)
        for number, ((kind, ids, seed), more) in enumerate(zip(cases, answers, strict=True))
        if more
    ]


@torch.inference_mode()
def main() -> None:
    """Prints a table of accepted drafts per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    for name in ("draft", "eagle3"):
        folder = DEMO_FOLDER.with_name(f"demo_{name}")
        parser.add_argument(f"--{name}", type=Path, default=folder, help=f"its drafter (default: models/{folder.name})")
    parser.add_argument("--prompts", type=int, default=100, help="held-out documents and chats (default: 100)")
    args = parser.parse_args()
    written = outputs(args)
    target = read_model(args.model)
    drafters = {
        args.draft.name: model_drafter(read_model(args.draft)),
        args.eagle3.name: head_drafter(read_head(args.eagle3), target),
        args.model.name: model_drafter(target),
    }
    tallies: defaultdict[tuple[str, str, str], Steps] = defaultdict(Steps)
    for output in tqdm(written, unit="output"):
        choice = "greedy" if output.seed is None else "temperature 1"
        for name, drafter in drafters.items():
            tallies[name, output.kind, choice].add_predictions(drafter(output), output.start)
        del output.noise  # it takes some megabytes
    print("| drafter | text | choice | tokens |", *(f"k = {k} |" for k in COUNTS))
    print("|---|---|---|---:|" + "---:|" * MAX_DRAFTS)
    for name in drafters:
        for (_, kind, choice), steps in sorted(item for item in tallies.items() if item[0][0] == name):
            means = (f"{steps.accepted[k] / steps.number[k]:.2f} |" for k in COUNTS)
            print(f"| {name} | {kind} | {choice} | {steps.tokens:,} |", *means)


if __name__ == "__main__":
    main()
