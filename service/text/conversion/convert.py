"""Finds a model's tokenizer file, and converts one that is not a tokenizer.json."""

from pathlib import Path

import msgspec

from penstock.models.checkpoint.files.model_files import MAX_SENTENCEPIECE_BYTES, MAX_TOKENIZER_BYTES, MIB
from penstock.service.text.conversion.described import ConversionError, DescribedTokenizer
from penstock.service.text.conversion.sentencepiece_model import convert_sentencepiece
from penstock.service.text.conversion.tekken import convert_tekken
from penstock.service.text.conversion.tiktoken_model import convert_tiktoken
from penstock.service.text.tokenizer_config import TokenizerConfig, TokenizerError, read_bytes, read_tokenizer_config
from penstock.service.text.tokenizer_files import MAKE_TOKENIZER, TOKENIZER, ConvertedTokenizer

TEKKEN, SENTENCEPIECE, TIKTOKEN = "tekken.json", "tokenizer.model", "tiktoken.model"


def convert_tokenizer(directory: Path, into: Path) -> ConvertedTokenizer | None:
    """Writes a tokenizer.json into the directory ``into`` if ``directory`` has none, but another file that describes
    its tokenizer. Returns None if it has no such file, or needs none. Raises TokenizerError."""
    names = (TOKENIZER, TEKKEN, SENTENCEPIECE, TIKTOKEN)
    found = next((directory / name for name in names if (directory / name).exists()), None)
    if found is None or found.name == TOKENIZER:
        return None
    max_bytes = MAX_TOKENIZER_BYTES if found.name == TEKKEN else MAX_SENTENCEPIECE_BYTES
    content = read_bytes(found, "fetch it again", max_bytes)
    try:
        described = _convert(found, content, read_tokenizer_config(directory))
        written = msgspec.json.encode(described.tokenizer_json)
        if len(written) > MAX_TOKENIZER_BYTES:
            raise ConversionError(f"makes a {TOKENIZER} of more than {MAX_TOKENIZER_BYTES // MIB} MiB")
    except ConversionError as error:
        raise TokenizerError(f"{found}: {error}: fetch it again, or {MAKE_TOKENIZER}") from error
    (into / TOKENIZER).write_bytes(written)
    return ConvertedTokenizer(into / TOKENIZER, found, described.named)


def _convert(file: Path, content: bytes, config: TokenizerConfig) -> DescribedTokenizer:
    if file.name == TEKKEN:
        return convert_tekken(content, config.fields)
    if file.name == TIKTOKEN:
        return convert_tiktoken(content, config.fields.get("tokenizer_class"), config.decoder)
    return convert_sentencepiece(content, config.fields, config.decoder)
