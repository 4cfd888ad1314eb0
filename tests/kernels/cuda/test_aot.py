"""Variants compile for Hopper, on a machine without one; each is printed with what it takes."""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from penstock.kernels import aot as ahead
from penstock.kernels.aot import MAX_SHARED_BYTES, QUANTIZED, KernelResources, variants, wanted
from penstock.kernels.cuda.core.launch import FP8_CAPABILITY
from penstock.kernels.cuda.model_shapes import SHAPES

HOPPER_SHARED_BYTES = 227 * 1024
# Of a thread: a few registers at the edge of a loop cost nothing, a loop's own would be many more.
MAX_SPILLED_BYTES = 32
# Decoding from fp8 spills more, and is 10 % faster than the largest form that spills nothing (H200).
MAX_SPILLED_BYTES_FP8 = 128

# A model that has windows beside layers that see all, a cap and large heads.
SOME = ("Gemma-2-2B",)

# A number that were specialised would be compiled anew for 1, and for a multiple of 16.
SPECIALISED = """
from penstock.kernels.aot import variants
from penstock.kernels.cuda.model_shapes import SHAPES
for variant in (variant for shape in SHAPES.values() for variant in variants(shape)):
    numbers = {name for name, kind in variant.arguments.items() if isinstance(kind, str)}
    for parameter in variant.kernel.params:
        if parameter.name in numbers and not parameter.do_not_specialize:
            print(variant.kernel.__name__, parameter.name)
        assert parameter.name in {*variant.arguments, *variant.constants, "PDL"}, parameter.name
"""

# What loops of attention wait for: a block's keys and values, with how many reads still under way. And how often
# something is subtracted from a score that a mask chose: without a mask it would be one multiply-add, and other bits.
ATTENTION = """
import json, re, sys
from penstock.kernels.aot import wanted
from penstock.kernels.cuda.model_shapes import SHAPES
for name, variant in wanted(SHAPES[model] for model in sys.argv[1:]).items():
    compiled = variant.compile(90)  # all of them, in the order in which they were: so Triton finds them again
    if name.startswith(("decode_kernel", "prefill_kernel")):
        waits = re.findall(r"async_wait %.*{num = (\\d+)", compiled.asm["ttgir"])
        selected = set(re.findall(r"selp\\.f32\\s+(%\\w+),", compiled.asm["ptx"]))
        minuends = re.findall(r"sub\\S*\\.f32\\s+%\\w+, (%\\w+),", compiled.asm["ptx"])
        print(json.dumps([name, [int(wait) for wait in waits], len(selected.intersection(minuends))]))
"""


# How often a kernel synchronises with those before and after it, and whether it is launched for that.
EARLY = """
from penstock.kernels.aot import variants
from penstock.kernels.cuda.model_shapes import SHAPES
variant = next(variants(SHAPES["Qwen3-0.6B"]))
for capability in (80, 90):
    compiled = variant.compile(capability)
    print(capability, compiled.asm["ptx"].count("griddepcontrol"), compiled.metadata.launch_pdl)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what is compiled is kept: nothing at first, and then for the tests that follow."""
    return tmp_path_factory.mktemp("compiled")


def run(folder: Path, *command: str) -> str:
    """What Python prints, where kernels are compiled and not interpreted."""
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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("models", [SOME, pytest.param(tuple(SHAPES), marks=pytest.mark.soak)], ids=["some", "all"])
def test_every_variant_compiles_for_hopper(models: tuple[str, ...], folder: Path) -> None:
    printed = run(folder, "-m", "penstock.kernels.aot", *models)
    print(printed)
    heading, *lines = printed.splitlines()
    assert str(HOPPER_SHARED_BYTES) in heading
    figures = {}
    for line in lines:
        *numbers, name = line.split(maxsplit=3)
        figures[name] = [int(number) for number in numbers]
    expected = wanted(SHAPES[model] for model in models)
    assert len(figures) == len(lines) == len(expected)
    # No stage had to be dropped. Other parts of a name may differ, since this process uses the interpreter.
    stages, expected_stages = (
        Counter(name.rpartition("STAGES=")[2] for name in names) for names in (figures, expected)
    )
    assert stages == expected_stages
    for name, (shared, registers, spilled) in figures.items():
        assert shared <= HOPPER_SHARED_BYTES, name
        assert 0 < registers <= 255, name
        is_fp8_decoding = name.startswith("decode_kernel") and "fp8e4nv" in name
        assert spilled <= (MAX_SPILLED_BYTES_FP8 if is_fp8_decoding else MAX_SPILLED_BYTES), name


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("quantization", [None, *QUANTIZED])
@pytest.mark.parametrize("capability", sorted(MAX_SHARED_BYTES))
def test_every_variant_compiles_for_other_gpus(capability: int, quantization: str | None, folder: Path) -> None:
    """With fewer stages, if the GPU has less shared memory than Hopper."""
    arguments = ["--quantization", quantization, "Llama-3.1-8B"] if quantization else []
    printed = run(folder, "-m", "penstock.kernels.aot", "--capability", str(capability), *arguments)
    heading, *lines = printed.splitlines()
    assert str(MAX_SHARED_BYTES[capability]) in heading
    has_none = quantization is not None and quantization.startswith("fp8") and capability < FP8_CAPABILITY
    assert bool(lines) != has_none


def test_attention_reads_blocks_while_others_are_computed_and_computes_all_alike(folder: Path) -> None:
    lines = run(folder, "-c", ATTENTION, *SOME).splitlines()
    assert len(lines) > len(SOME)
    for name, waits, num_apart in map(json.loads, lines):
        assert num_apart == 0, name
        # Those behind a loop wait for no value, but for everything.
        assert waits, name
        assert min(waits) >= 2, name  # keys and values of at least one more block are under way


def test_no_number_is_specialised(folder: Path) -> None:
    assert run(folder, "-c", SPECIALISED) == ""


def test_a_variant_that_needs_too_much_shared_memory_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(variant: object, capability: int) -> KernelResources:
        return KernelResources("it", HOPPER_SHARED_BYTES + (variant is next(variants(SHAPES["Llama-3.1-8B"]))), 32, 0)

    monkeypatch.setattr(ahead, "measure", measured)
    ahead.main(["Qwen3-0.6B"])
    with pytest.raises(SystemExit, match=r"too much shared memory: it$"):
        ahead.main([])
    assert "232449" in capsys.readouterr().out


def test_kernels_that_start_early_first_wait_for_the_kernel_before() -> None:
    early = {
        variant.kernel for shape in SHAPES.values() for variant in variants(shape) if "PDL" in variant.kernel.arg_names
    }
    assert len(early) > 5
    for kernel in early:
        body = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body[0].body  # type: ignore[attr-defined]
        statements = [
            statement for statement in body if not isinstance(getattr(statement, "value", None), ast.Constant)
        ]
        assert ast.unparse(statements[0]) == "await_inputs(PDL)", kernel.fn.__name__


def test_only_gpus_that_can_start_kernels_early_do(folder: Path) -> None:
    assert run(folder, "-c", EARLY) == "80 0 False\n90 2 True\n"


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ahead.main(["GPT-5"])
    assert "GPT-5" in capsys.readouterr().err
