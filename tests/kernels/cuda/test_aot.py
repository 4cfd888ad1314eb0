"""Variants compile for Hopper, on a machine without one; each is printed with what it takes."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels import aot as ahead
from penstock.kernels.aot import MAX_SHARED_BYTES, QUANTIZED, KernelResources, supports_quantization, variants, wanted
from penstock.kernels.cuda.example_shapes import SHAPES

ROOT = Path(__file__).parents[3]
OLDEST_TRITON = ROOT / "build" / "oldest-triton"
HOPPER_SHARED_BYTES = 227 * 1024
# Of a thread: a few registers at the edge of a loop cost nothing, a loop's own would be many more. Most variants spill
# nothing; prefill with groups of 3 or 5 heads spills 10 of its 255 registers.
MAX_SPILLED_BYTES = 40
# On GPUs without Hopper's wide products a product's operands are in registers too. Experts in MXFP4 spill most.
MAX_SPILLED_BYTES_OTHERS = 72

# A model that has a cap and large heads: its attention with a window and without KV in fp8, and the products of one of
# its matrices and of adapters.
SOME = ("Gemma-2-2B",)
SOME_PRODUCTS = "skinny_gemm_kernel.*=9216.* BLOCK_T=(16|64)|gemm_kernel.*=9216|_(shrink|expand).*=2304 R"
SOME_KERNELS = f"^(?!.*fp8)((decode|prefill)_kernel.* WINDOW=4096|{SOME_PRODUCTS})"

# A number that were specialised would be compiled anew for 1, and for a multiple of 16.
SPECIALISED = """
from penstock.kernels.aot import variants
from penstock.kernels.cuda.example_shapes import SHAPES
for variant in (variant for shape in SHAPES.values() for variant in variants(shape)):
    numbers = {name for name, kind in variant.arguments.items() if isinstance(kind, str)}
    for parameter in variant.kernel.params:
        if parameter.name in numbers and not parameter.do_not_specialize:
            print(variant.kernel.__name__, parameter.name)
        assert parameter.name in {*variant.arguments, *variant.constants, "PDL"}, parameter.name
"""

# The parts of compiled products. A product's rows, and whether it uses the tensor cores' wide instructions. The blocks
# that loops wait for, with how many reads still under way, and the sizes of these reads. Accesses to local memory, and
# conversions that only a slow unit does. And how often something is subtracted from a score that a mask chose:
# without a mask it would be one multiply-add, and other bits.
PRODUCTS = """
import json, re, sys
from penstock.kernels.aot import wanted
from penstock.kernels.cuda.example_shapes import SHAPES
READS = r"cp\\.async\\.c\\S+ \\[.*?\\], \\[.*?\\], (\\w+)"
for name, variant in wanted(SHAPES[model] for model in sys.argv[2:]).items():
    if not re.search(sys.argv[1], name):
        continue
    compiled = variant.compile(90)  # all of them, in the order in which they were: so Triton finds them again
    ttgir, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
    rows = re.findall(r"tt.dot .* : tensor<(\\d+)x", compiled.asm["ttir"])
    if rows:
        sass = compiled.asm["sass"]
        selected = set(re.findall(r"selp\\.f32\\s+(%\\w+),", ptx))
        minuends = re.findall(r"sub\\S*\\.f32\\s+%\\w+, (%\\w+),", ptx)
        print(json.dumps({
            "name": name,
            "rows": min(map(int, rows)),
            "is_wide": "wgmma.mma_async" in ptx,
            "waits": [int(wait) for wait in re.findall(r"async_wait %.*{num = (\\d+)", ttgir)],
            "read_bytes": sorted({int(size, 0) for size in re.findall(READS, ptx)}),
            "local": len(re.findall(r"\\b(?:LDL|STL)\\b", sass)),
            "slow": len(re.findall(r"\\bF2F\\b", sass)),
            "apart": len(selected.intersection(minuends)),
        }))
"""


# How often a kernel synchronises with those before and after it, and whether it is launched for that.
EARLY = """
from penstock.kernels.aot import variants
from penstock.kernels.cuda.example_shapes import SHAPES
variant = next(variants(SHAPES["Qwen3-0.6B"]))
for capability in (80, 90):
    compiled = variant.compile(capability)
    print(capability, compiled.asm["ptx"].count("griddepcontrol"), compiled.metadata.launch_pdl)
"""

# The kernels of each kind of recurrent layer, with the bytes of local memory that a thread needs.
RECURRENT = """
from penstock.kernels.aot import measure
from penstock.kernels.cuda.example_shapes import SHAPES
from penstock.kernels.cuda.recurrent.shapes import recurrent_variants
examples = ("LFM2-1.2B", "Qwen3-Next-80B-A3B", "Granite-4.0-H-Tiny")
for kind in (kind for name in examples for kind in SHAPES[name].recurrent):
    for variant in recurrent_variants(kind, commits=True, deterministic=False):
        needed = measure(variant, 90)
        print(needed.spilled_bytes, needed.name)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what is compiled is kept: nothing at first, and then for the tests that follow."""
    return tmp_path_factory.mktemp("compiled")


def run(folder: Path, *command: str, packages: Path | None = None) -> str:
    """What Python prints, where kernels are compiled and not interpreted. Packages in a folder come first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    done = subprocess.run(
        [sys.executable, "-P", *command],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_resources(models: tuple[str, ...], printed: str, kernels: str = "") -> None:
    """All variants of the models, or those of some kernels, are there, and none needs more than Hopper has."""
    print(printed)
    heading, *lines = printed.splitlines()
    assert str(HOPPER_SHARED_BYTES) in heading
    figures = {}
    for line in lines:
        *numbers, name = line.split(maxsplit=3)
        figures[name] = [int(number) for number in numbers]
    expected = [name for name in wanted(SHAPES[model] for model in models) if re.search(kernels, name)]
    assert len(figures) == len(lines) == len(expected)
    # No stage had to be dropped. Other parts of a name may differ, since this process uses the interpreter.
    stages, expected_stages = (
        Counter(name.rpartition("STAGES=")[2] for name in names) for names in (figures, expected)
    )
    assert stages == expected_stages
    for name, (shared, registers, spilled) in figures.items():
        assert shared <= HOPPER_SHARED_BYTES, name
        assert 0 < registers <= 255, name
        assert spilled <= MAX_SPILLED_BYTES, name


@pytest.mark.soak
def test_recurrent_layers_compile_for_hopper_and_spill_nothing(folder: Path) -> None:
    printed = run(folder, "-c", RECURRENT)
    print(printed)
    assert {line.split()[1] for line in printed.splitlines()} == {
        "_convolution",
        "_scan",
        "_chunk_products",
        "_scan_chunks",
        "_gated_norm",
    }
    assert all(line.startswith("0 ") for line in printed.splitlines())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not OLDEST_TRITON.exists(), reason="`make soak` installs it")
def test_every_variant_compiles_with_the_oldest_triton(tmp_path: Path) -> None:
    """It fits as well as with the one that is installed."""
    version = run(tmp_path, "-c", "import triton; print(triton.__version__)", packages=OLDEST_TRITON).strip()
    assert f"triton>={version.removesuffix('.0')}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    check_resources(tuple(SHAPES), run(tmp_path, "-m", "penstock.kernels.aot", packages=OLDEST_TRITON))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("capability", "quantization"),
    [
        (capability, quantization)
        for capability in sorted(MAX_SHARED_BYTES)
        for quantization in (None, *QUANTIZED)
        if quantization is None or supports_quantization(quantization, capability)
    ],
)
def test_every_variant_compiles_for_other_gpus(capability: int, quantization: str | None, folder: Path) -> None:
    """With fewer stages, if the GPU has less shared memory than Hopper. Products with quantised weights may spill."""
    arguments = ["--quantization", quantization, "Llama-3.1-8B"] if quantization else []
    printed = run(folder, "-m", "penstock.kernels.aot", "--capability", str(capability), *arguments)
    heading, *lines = printed.splitlines()
    assert str(MAX_SHARED_BYTES[capability]) in heading
    assert lines
    figures = [(*map(int, numbers), name) for *numbers, name in (line.split(maxsplit=3) for line in lines)]
    shared, registers, spilled, names = zip(*figures, strict=True)
    most = f"{max(shared)} bytes of shared memory, {max(registers)} registers, {max(spilled)} bytes spilled"
    print(f"{capability} {quantization}: {len(names)} variants, with at most {most}")
    if quantization is None:
        limit = MAX_SPILLED_BYTES if capability == 90 else MAX_SPILLED_BYTES_OTHERS
        assert [name for number, name in zip(spilled, names, strict=True) if number > limit] == []


def check_attention(products: list[dict[str, Any]]) -> None:
    """It reads blocks while others are computed, and computes all alike."""
    attention = [each for each in products if each["name"].startswith(("decode_kernel", "prefill_kernel"))]
    assert len(attention) > len(SOME)
    for each in attention:
        assert each["apart"] == 0, each["name"]
        # Those behind a loop wait for no value, but for everything.
        assert each["waits"], each["name"]
        # One block is waited for, and one is read meanwhile; with more stages, keys and values of others are under way.
        num_stages = int(each["name"].rpartition("STAGES=")[2])
        assert min(each["waits"]) >= 2 * (num_stages - 2), each["name"]


def check_budgets(products: list[dict[str, Any]]) -> None:
    """Reads are of 16 bytes, tensor cores use wide instructions from 64 rows on, and loops access no local memory."""
    for each in products:
        name = each["name"]
        is_fp8 = "fp8e4nv" in name
        # For large heads, fp8 is converted to bf16, since with fp16 registers would spill.
        has_large_heads = is_fp8 and ("BLOCK_D=256" in name or "BLOCK_D=512" in name)
        assert each["is_wide"] == (each["rows"] >= 64), each
        # With a small rank, adapters' B is read at once, without a loop and so without copies beside it. So are the
        # parts of a chunk, between products that depend on each other.
        is_read_at_once = name.startswith(("_expand", "_chunk_products", "_scan_chunks"))
        reads = each["read_bytes"] or ([16] if is_read_at_once else [0])
        # Without wide products, keys in fp8 are read as products take their operands: 8 bytes of a row at a time.
        reads_halves = has_large_heads or (is_fp8 and name.startswith("decode_kernel") and not each["is_wide"])
        assert min(reads) >= (8 if reads_halves else 16), each
        assert each["slow"] == 0 or has_large_heads, each
        # Each spilled number is stored and loaded once.
        assert each["local"] <= MAX_SPILLED_BYTES / 4 * 2, each


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("models", "kernels"),
    [(SOME, SOME_KERNELS), pytest.param(tuple(SHAPES), "", marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_every_variant_compiles_for_hopper(models: tuple[str, ...], kernels: str, folder: Path) -> None:
    """One test, since another process would compile all of them again."""
    check_resources(models, run(folder, "-m", "penstock.kernels.aot", "--kernels", kernels, *models), kernels)
    products = [json.loads(line) for line in run(folder, "-c", PRODUCTS, kernels, *models).splitlines()]
    check_attention(products)
    check_budgets(products)


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--kernels", "("], "--kernels: not a regular expression"),
        (["--kernels", "nothing"], "--kernels: no variant matches"),
        (["--capability", "86", "--quantization", "fp8-weights"], "--quantization fp8-weights: needs --capability 89"),
    ],
)
def test_what_selects_nothing_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ahead.main([*arguments, "Qwen3-0.6B"])
    assert problem in capsys.readouterr().err


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ahead.main(["GPT-5"])
    assert "GPT-5" in capsys.readouterr().err
