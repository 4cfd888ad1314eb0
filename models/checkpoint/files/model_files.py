"""Opens the files of a model's directory, which come from strangers: only regular files, and no more of a file than it
may have. Knows nothing of their content, and needs no torch."""

import os
import stat
from pathlib import Path

from penstock.models.errors import ModelError

MIB = 1 << 20
MAX_CONFIG_BYTES = 4 * MIB
"""Of config.json and generation_config.json, and of sentence-transformers' files. The largest known ones, with lists of
quantised modules, have a tenth."""
MAX_INDEX_BYTES = 32 * MIB
"""Of model.safetensors.index.json; those of a trillion parameters have half."""
MAX_TOKENIZER_BYTES = 128 * MIB
"""Of tokenizer.json; those of 262,144 tokens have a quarter."""
MAX_TOKENIZER_CONFIG_BYTES = 8 * MIB
"""Of tokenizer_config.json, special_tokens_map.json and added_tokens.json."""
MAX_TEMPLATE_BYTES = 1 * MIB
"""Of a chat template; the largest known ones have a tenth."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def open_model_file(file: Path) -> int:
    """A descriptor of a regular file, perhaps behind links. Raises OSError, and ModelError for anything else, which may
    have no end, or make its reader wait."""
    _check_kind(file, os.stat(file))  # first, since opening a device may do something
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_kind(file, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_model_file(file: Path, max_bytes: int, within: Path | None = None) -> bytes:
    """The whole of a file that has at most ``max_bytes``. Where it is a link it must not lead out of ``within``.
    Raises OSError and ModelError."""
    descriptor = open_model_file(file)
    with os.fdopen(descriptor, "rb") as stream:
        if within is not None:
            _check_place(file, within)
        # A file of the kernel's has no size, and may have content without end, or make its reader wait.
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
    """A link that leads elsewhere would show callers a file of this machine's. Those of Hugging Face's cache lead to
    the blobs beside a model's snapshots."""
    target = file.resolve()
    blobs = target.parent
    is_blob = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    if not is_blob and not target.is_relative_to(directory.resolve()):
        raise ModelError(f"{file}: is a link out of the model's directory: put a copy of the file in its place")
