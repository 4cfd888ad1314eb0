"""torch's products of bfloat16 work on this machine, and where they would not, oneDNN is told to do without AMX."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.kernels.reference import onednn_amx as torch_tiles
from penstock.kernels.reference.onednn_amx import VARIABLE, WITHOUT_TILES, avoid_broken_tiles


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of a processor with AMX; nothing was decided yet."""
    monkeypatch.setenv(VARIABLE, "")  # so that what is set from here on is undone
    monkeypatch.delenv(VARIABLE)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8\n")
    return cpuinfo


def test_a_product_that_works_changes_nothing(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, _: x)
    avoid_broken_tiles(processor)
    assert VARIABLE not in os.environ


def test_a_product_that_dies_is_avoided(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: os.kill(os.getpid(), signal.SIGILL))
    avoid_broken_tiles(processor)
    assert os.environ[VARIABLE] == WITHOUT_TILES


def test_a_product_that_hangs_is_avoided(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: signal.pause())
    monkeypatch.setattr(torch_tiles, "TRIAL_S", 1)
    avoid_broken_tiles(processor)
    assert os.environ[VARIABLE] == WITHOUT_TILES


def test_a_child_that_raises_ends_too(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: 1 / 0)
    parent = os.getpid()
    try:
        avoid_broken_tiles(processor)
    finally:
        ran.append(os.getpid())
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)  # or it would run the other tests
    assert ran == [parent]
    assert VARIABLE not in os.environ


def test_what_the_operator_chose_stays(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "AVX2")
    avoid_broken_tiles(processor)
    assert os.environ[VARIABLE] == "AVX2"


def test_without_amx_nothing_is_tried(processor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor.write_text("flags\t\t: fpu avx512_bf16\n")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("tried"))
    avoid_broken_tiles(processor)
    avoid_broken_tiles(processor.with_name("none"))
    assert VARIABLE not in os.environ


def test_torch_multiplies_bfloat16_here() -> None:
    """In a process that has nothing from this one's environment."""
    script = (
        "from penstock.kernels.reference.onednn_amx import avoid_broken_tiles; avoid_broken_tiles(); import torch;"
        "x = torch.ones(64, 256).bfloat16(); print(float(torch.nn.functional.linear(x, x).sum()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{64.0 * 64 * 256}\n"), done.stderr
