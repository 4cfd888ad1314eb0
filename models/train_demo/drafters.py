"""Shared by the scripts that train drafters: flags, the model that a drafter learns from, and held-out text."""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.models.train_demo.evaluate import windows
from penstock.models.train_demo.export import read_model
from penstock.models.train_demo.network import Decoder
from penstock.models.train_demo.tokenize_corpus import DEMO_FOLDER
from penstock.models.train_demo.trainer import training_parser

HELDOUT_LENGTH = 256


def drafter_parser(description: str | None, run: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of these scripts. `run` is the default of --run; the default of --out is
    models/demo_`run`."""
    parser = training_parser(description, run=run, minutes=25.0, dtype="float32")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    out = DEMO_FOLDER.with_name(f"demo_{run}")
    parser.add_argument("--out", type=Path, default=out, help=f"output folder (default: models/{out.name})")
    parser.set_defaults(batch_tokens=2048)  # with so few tokens, many small updates learn more
    return parser


def read_frozen(args: argparse.Namespace) -> tuple[Decoder, Tokenizer]:
    """Returns the model that the drafter learns from, with frozen parameters, and its tokenizer."""
    model = read_model(args.model).to(args.device).requires_grad_(requires_grad=False)
    return model, Tokenizer.from_file(str(args.model / "tokenizer.json"))


def heldout_ids(args: argparse.Namespace, tokenizer: Tokenizer) -> Tensor:
    """Returns a sample of held-out text: int64 of shape (rows, `HELDOUT_LENGTH` + 1)."""
    sample = windows(args.work / "heldout.jsonl", tokenizer, HELDOUT_LENGTH, 60)
    whole = [window.ids for window in sample if len(window.ids) == HELDOUT_LENGTH + 1]
    return torch.tensor(whole, device=args.device)
