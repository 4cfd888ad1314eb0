"""Opens the files of a model's directory, which are untrusted: only regular files, up to a maximum size."""

import os
import stat
from pathlib import Path

from penstock.models.errors import ModelError

MIB = 1 << 20
MAX_CONFIG_BYTES = 4 * MIB
"""The limit for config.json, generation_config.json and sentence-transformers' files: ten times the largest known."""
MAX_INDEX_BYTES = 32 * MIB
"""The limit for model.safetensors.index.json. For models with a trillion parameters it is half of this."""
MAX_TOKENIZER_BYTES = 128 * MIB
"""The limit for tokenizer.json and tekken.json. With 262,144 tokens it is a quarter of this."""
MAX_SENTENCEPIECE_BYTES = 16 * MIB
"""The limit for tokenizer.model, three times the largest known. Every two bytes of it may be a
token, which takes fifty bytes of memory."""
MAX_TOKENIZER_CONFIG_BYTES = 8 * MIB
"""The limit for tokenizer_config.json, special_tokens_map.json and added_tokens.json."""
MAX_TEMPLATE_BYTES = 1 * MIB
"""The limit for a chat template. The largest known ones are a tenth of this."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def open_model_file(file: Path) -> int:
    """Opens a regular file, perhaps through links, and returns its descriptor. Raises OSError. Raises ModelError for
    anything else, since reading it may block or never end."""
    _check_kind(file, os.stat(file))  # first, since opening a device may have side effects
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_kind(file, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_model_file(file: Path, max_bytes: int, within: Path | None = None) -> bytes:
    """Returns a file of at most ``max_bytes``. A link must point into ``within``. Raises OSError and ModelError."""
    descriptor = open_model_file(file)
    with os.fdopen(descriptor, "rb") as stream:
        if within is not None:
            _check_place(file, within)
        # A file in /proc or /sys has size 0, but reading it may block or never end.
        size = os.fstat(descriptor).st_size
        content = stream.read(max_bytes + 1) if 0 < size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        raise ModelError(f"{file}: is larger than {max_bytes // MIB} MiB, which no such file needs: download it again")
    return content


def _check_kind(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of another kind")
        raise ModelError(f"{file}: cannot be read: it is {kind}, and must be a regular file: download it again")


def _check_place(file: Path, directory: Path) -> None:
    """Raises ModelError for a link out of the directory, which would expose another file of this machine to callers.
    Links in Hugging Face's cache point to the blobs beside a model's snapshots."""
    target = file.resolve()
    blobs = target.parent
    is_blob = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    if not is_blob and not target.is_relative_to(directory.resolve()):
        raise ModelError(f"{file}: is a link out of the model's directory: put a copy of the file in its place")
