"""Digests of a model's files: the same for copies, and another one for each kind of change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.checkpoint.digest import CheckpointDigest, digest_checkpoint, short_digest


def digest(path: Path, *, has_weights: bool = True) -> CheckpointDigest:
    return digest_checkpoint(path, path, has_weights=has_weights)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo model elsewhere."""
    return shutil.copytree(resolve_model(DEMO), tmp_path / "copy", copy_function=shutil.copyfile)


def change_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 1234.0}))


def change_byte(at: float, name: str = "model.safetensors") -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        (path / name).write_bytes(content)

    return change


def test_a_copy_has_the_same_digest(copy: Path) -> None:
    own = digest(resolve_model(DEMO))
    assert digest(copy) == own
    assert len(set(own)) == 3
    assert {len(each) for each in own} == {8}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (change_config, "config"),
        (change_byte(0.0), "weights"),
        (change_byte(1.0), "weights"),
        (lambda path: (path / "model.safetensors").rename(path / "other.safetensors"), "weights"),
        (lambda path: (path / "more.safetensors").write_bytes(b""), "weights"),
        (change_byte(0.5, "tokenizer.json"), "tokenizer"),
        (lambda path: (path / "added_tokens.json").write_text("{}"), "tokenizer"),
    ],
)
def test_each_change_shows_in_its_own_part(copy: Path, change: Callable[[Path], object], part: str) -> None:
    before = digest(copy)
    change(copy)
    after = digest(copy)
    assert [name for name in before._fields if getattr(before, name) != getattr(after, name)] == [part]


def test_a_gguf_file_may_have_any_name(copy: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copyfile(copy / "model.safetensors", copy / name)
    assert digest_checkpoint(copy / "a.gguf", copy, has_weights=True) == digest_checkpoint(
        copy / "b.gguf", copy, has_weights=True
    )


def test_random_weights_are_those_of_no_file(copy: Path) -> None:
    assert digest(copy, has_weights=False).weights != digest(copy).weights


def test_parts_are_told_apart_by_their_lengths() -> None:
    assert short_digest(b"ab", b"c") != short_digest(b"a", b"bc")
