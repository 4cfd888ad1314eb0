"""A digest of a model's files, by which two services find out whether they serve the same model. Reads samples of the
weights, not all of them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from penstock.models.checkpoint.gguf_check import shard_names

DIGEST_BYTES = 8
_HEAD_BYTES = 1 << 20
"""The beginning of a file of weights that is read: the names, types and shapes of its tensors, or many of them."""
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
"""Samples per file of weights, at equal distances."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class CheckpointDigest(NamedTuple):
    """The digests of a model's files. Zeros where the files are unknown."""

    config: bytes = bytes(DIGEST_BYTES)
    weights: bytes = bytes(DIGEST_BYTES)
    tokenizer: bytes = bytes(DIGEST_BYTES)


def digest_checkpoint(path: Path, tokenizer: Path, *, has_weights: bool) -> CheckpointDigest:
    """Digests the model at ``path``, a directory or a GGUF file, and the directory of its tokenizer. ``has_weights``:
    whether the weights come from files. Raises OSError."""
    names = shard_names(path.name) if path.is_file() else ()
    weights: Iterable[Path] = [path.parent / name for name in names] or path.glob("*.safetensors")
    return CheckpointDigest(
        config=_digest([] if path.is_file() else [path / "config.json"], samples=False),
        weights=_digest(sorted(weights) if has_weights else [], samples=True),
        tokenizer=_digest([tokenizer / name for name in _TOKENIZER_FILES], samples=False),
    )


def short_digest(*parts: bytes) -> bytes:
    """Returns a digest of a few parts. It includes their lengths, so that no two lists of parts look alike."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _digest(files: Iterable[Path], *, samples: bool) -> bytes:
    """Digests the names and contents of the files that exist; with ``samples``, their sizes, their beginnings and
    samples of the rest. Holds the data of one file at a time."""
    parts: list[bytes] = []
    for file in files:
        if not file.is_file():
            continue
        # A GGUF file may have any name; the shards of a directory differ in theirs.
        parts.append(file.name.encode() if file.suffix != ".gguf" else b"gguf")
        parts.append(short_digest(*_samples(file)) if samples else short_digest(file.read_bytes()))
    return short_digest(*parts)


def _samples(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        yield stream.read(_HEAD_BYTES)
        for index in range(1, _NUM_SAMPLES + 1):
            stream.seek(max(0, size - _SAMPLE_BYTES) * index // _NUM_SAMPLES)
            yield stream.read(_SAMPLE_BYTES)
