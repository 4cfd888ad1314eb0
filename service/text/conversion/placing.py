"""Finds the directory with the tokenizer of a model's files, and makes one if a file of another format describes it."""

from contextlib import ExitStack
from pathlib import Path

from penstock.models.checkpoint.gguf.tokenizer import write_tokenizer
from penstock.service.private_directory import private_directory
from penstock.service.text.conversion.convert import convert_tokenizer
from penstock.service.text.tokenizer_files import TOKENIZER, ConvertedTokenizer


def place_tokenizer(path: Path, resources: ExitStack) -> tuple[Path, ConvertedTokenizer | None]:
    """Returns the directory with the tokenizer of the model at ``path``, a directory or a GGUF file, and what a
    file of another format was converted to. Directories that it makes exist as long as ``resources``. Raises
    ModelError and TokenizerError."""
    directory = path if path.is_dir() else _unpack(path, resources)
    if (directory / TOKENIZER).exists():
        return directory, None
    return directory, convert_tokenizer(directory, resources.enter_context(private_directory()))


def _unpack(path: Path, resources: ExitStack) -> Path:
    """Writes the tokenizer of a GGUF file into a directory, since service and worker read one from there."""
    # Errors about the tokenizer's files then contain the name of the model's file.
    directory = resources.enter_context(private_directory()) / path.name
    directory.mkdir()
    write_tokenizer(path, directory)
    return directory
