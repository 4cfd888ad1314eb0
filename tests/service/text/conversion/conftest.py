"""Directories with a tokenizer in one of the formats that are converted, and what the format's own library says."""

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import sentencepiece

from penstock.service.text.conversion.convert import SENTENCEPIECE, convert_tokenizer
from penstock.service.text.detokenizer import text_states
from penstock.service.text.tokenizer import Tokenizer

MISTRAL = Path(mistral_common.__file__).with_name("data")
"""The tokenizers of Mistral's models."""
CORPUS = [
    "the quick brown fox jumps over the lazy dog and then it rests in the shade of a tree",
    "def f(x: int) -> str:\n    return str(x)  # ok",
    "Füße, naïve, Ångström, ế; Здравствуй, мир. 你好，世界！ガキ 안녕하세요 שָׁלוֹם مَرَّ हिन्दी",
    "a    b        c\t\td\n\n\ne ==== ------ ..... 12345 67890",
    "hahahahaha 1 22 333 4444 <b> </b> [x] {y} (z) don't we'll",
]


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Tokenizer]:
    """Reads the tokenizer of a directory as the service does."""

    def read(directory: Path, **options: Any) -> Tokenizer:
        into = tmp_path / "converted"
        into.mkdir(exist_ok=True)
        return Tokenizer(directory, converted=convert_tokenizer(directory, into), **options)

    return read


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of tokens that come one by one."""
    state = text_states(tokenizer)()
    return "".join([*(state.feed(token_id).text for token_id in ids), state.finish().text])


def train(directory: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Writes a tokenizer.model, trained with SentencePiece's own defaults unless there are options for it."""
    (directory / SENTENCEPIECE).write_bytes(_trained(json.dumps(options)))
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / SENTENCEPIECE))


@cache
def _trained(options: str) -> bytes:
    defaults = {"vocab_size": 700, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4), model_writer=content, **{**defaults, **json.loads(options)}
    )
    return content.getvalue()
