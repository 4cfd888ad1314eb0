"""Continues passages of the corpus with the demo model, for the training of its drafters.

A drafter predicts the demo model's output, which repeats itself more than the corpus does. Passages are drawn from
train.bin and continued by `penstock generate`: a third greedily, a third with the settings of generation_config.json,
and a third at temperature 1. continuations.bin, like train.bin, contains documents that end with <|endoftext|>. Each is
a passage and its continuation, up to the end token. The same command resumes a run that was stopped.

Examples:
    nice -n 19 python continuations.py
    python continuations.py --requests 1000 --new-tokens 128 --work /data/demo-train
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.models.train_demo.prepare import DEFAULT_WORK
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER, END_OF_TEXT, IM_END, special_id

PROMPT_TOKENS = 48
MANNERS: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0})


def until_end(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns the ids up to and including the first of `ends`; all ids if there is none."""
    for number, token in enumerate(ids):
        if token in ends:
            return list(ids[: number + 1])
    return list(ids)


def answer(model: Path, requests: Sequence[dict[str, Any]], work: Path, name: str) -> list[list[int]]:
    """Returns the output tokens of `penstock generate` for each request. The requests' ids must be 0, 1, ...; the files
    stay in `work`."""
    asked, answered = work / f"{name}-requests.jsonl", work / f"{name}-answers.jsonl"
    text = "".join(json.dumps(request) + "\n" for request in requests)
    if not asked.exists() or asked.read_text() != text:
        answered.unlink(missing_ok=True)  # it belongs to other requests
        asked.write_text(text)
    command = ["penstock", "generate", str(model), "--input", str(asked), "--output", str(answered)]
    subprocess.run(command, check=True)
    tokens = {record["id"]: record["token_ids"] for record in map(json.loads, answered.read_text().splitlines())}
    return [tokens[number] for number in range(len(requests))]


def main() -> None:
    """Generates the continuations and writes continuations.bin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    parser.add_argument("--requests", type=int, default=8000, help="passages to continue (default: 8000)")
    parser.add_argument("--new-tokens", type=int, default=256, help="maximum tokens after each one (default: 256)")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ends = special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)
    corpus = np.memmap(args.work / "train.bin", dtype=np.uint16, mode="r")
    starts = np.random.default_rng(3).integers(0, len(corpus) - PROMPT_TOKENS, args.requests)
    prompts = [corpus[start : start + PROMPT_TOKENS].tolist() for start in starts]
    # With ignore_eos the output includes the end token, which is one of two.
    options = {"max_tokens": args.new_tokens, "ignore_eos": True}
    requests = [
        {"id": number, "prompt_token_ids": prompt, "seed": number, **options, **MANNERS[number % len(MANNERS)]}
        for number, prompt in enumerate(prompts)
    ]
    documents = [
        [*prompt, *until_end(ids, ends), ends[0]]
        for prompt, ids in zip(prompts, answer(args.model, requests, args.work, "continuations"), strict=True)
    ]
    stream = np.concatenate(documents).astype(np.uint16)
    (args.work / "continuations.bin").write_bytes(stream.tobytes())
    print(f"{len(documents):,} documents, {len(stream):,} tokens")


if __name__ == "__main__":
    main()
