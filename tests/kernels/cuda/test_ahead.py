"""Every variant compiles for Hopper, on a machine without one; each is printed with what it takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.cuda import ahead
from penstock.kernels.cuda.ahead import Usage, variants
from penstock.kernels.cuda.shapes import SHAPES

HOPPER_SHARED_BYTES = 227 * 1024

# A number that were specialised would be compiled anew for 1, and for a multiple of 16.
SPECIALISED = """
from penstock.kernels.cuda.ahead import variants
from penstock.kernels.cuda.shapes import SHAPES
for variant in (variant for shape in SHAPES.values() for variant in variants(shape)):
    numbers = {name for name, kind in variant.arguments.items() if isinstance(kind, str)}
    for parameter in variant.kernel.params:
        if parameter.name in numbers and not parameter.do_not_specialize:
            print(variant.kernel.__name__, parameter.name)
        assert parameter.name in {*variant.arguments, *variant.constants}, parameter.name
"""


def run(folder: Path, *command: str) -> str:
    """What Python prints, where kernels are compiled, and none was before."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", *command],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_variant_compiles_for_hopper(tmp_path: Path) -> None:
    printed = run(tmp_path, "-m", "penstock.kernels.cuda.ahead")
    print(printed)
    heading, *lines = printed.splitlines()
    assert str(HOPPER_SHARED_BYTES) in heading
    figures = {}
    for line in lines:
        *numbers, name = line.split(maxsplit=3)
        figures[name] = [int(number) for number in numbers]
    expected = {ahead.describe(variant) for shape in SHAPES.values() for variant in variants(shape)}
    assert expected <= set(figures)
    assert len(figures) == len(lines)
    for name, (shared, registers, spilled) in figures.items():
        assert shared <= HOPPER_SHARED_BYTES, name
        assert 0 < registers <= 255, name
        assert spilled == 0, name


def test_no_number_is_specialised(tmp_path: Path) -> None:
    assert run(tmp_path, "-c", SPECIALISED) == ""


def test_a_variant_that_needs_too_much_shared_memory_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(variant: object, capability: int) -> Usage:
        return Usage("it", HOPPER_SHARED_BYTES + (variant is next(variants(SHAPES["Llama-3.1-8B"]))), 32, 0)

    monkeypatch.setattr(ahead, "measure", measured)
    ahead.main(["Qwen3-0.6B"])
    with pytest.raises(SystemExit, match=r"too much shared memory: it$"):
        ahead.main([])
    assert "232449" in capsys.readouterr().out


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ahead.main(["GPT-5"])
    assert "GPT-5" in capsys.readouterr().err
