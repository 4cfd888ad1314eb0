"""What is asked: text that repeats what it has, and text that does not."""

import json
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = Path(__file__).parents[2] / "models" / "heldout.jsonl"
PASSAGE, STRIDE = 900, 97
"""Characters: of a passage, and from one to the next of a document. So there are some 700, and what was asked before is
not asked again."""


@dataclass(frozen=True)
class Text:
    """A kind of text."""

    name: str
    temperature: float
    prompts: tuple[str, ...]


def texts(num_prompts: int, begin: int = 0) -> tuple[Text, Text]:
    """Repetition: passages of documents and code, quoted once and begun again, greedily. Prose: beginnings of
    documents, sampled, so that the model does not go in circles. ``begin``: the first passage."""
    documents = [json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()]
    passages = [
        text[start : start + PASSAGE]
        for start in range(0, 60 * PASSAGE, STRIDE)
        for text in documents
        if len(text) >= start + PASSAGE
    ]
    passages = [passages[(begin + at) % len(passages)] for at in range(num_prompts)]
    quoted = tuple(f"{passage}\n\n{passage}\n\n{passage[:100]}" for passage in passages)
    return (
        Text("repetition", 0.0, quoted),
        Text("prose", 1.0, tuple(passage[: PASSAGE // 3] for passage in passages)),
    )
