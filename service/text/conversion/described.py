"""What a conversion returns, and what it raises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.models.checkpoint.tokenizer.parts import Part


class ConversionError(Exception):
    """A file that cannot be converted. The text continues a sentence that begins with the file's name."""


@dataclass(frozen=True)
class DescribedTokenizer:
    """A tokenizer in the form of a model's own files."""

    tokenizer_json: Part
    named: Mapping[str, str]
    """Tokens with a name, such as eos_token, that tokenizer_config.json may leave out."""


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns a field of tokenizer_config.json that is true or false."""
    value = fields.get(name)
    return value if isinstance(value, bool) else default
