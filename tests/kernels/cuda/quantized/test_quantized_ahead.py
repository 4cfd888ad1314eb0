"""What Triton makes of our products for Hopper, which takes no GPU, but a process without the interpreter."""

import json
import os
import subprocess
import sys

import pytest

from penstock.kernels import aot as ahead
from penstock.kernels.aot import KernelResources, describe

MAX_SHARED = 227 * 1024

COMPILE = """
import json, re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from penstock.kernels.aot import QUANTIZED, float_variants, measure, quantized_variants
from penstock.kernels.cuda.example_shapes import SHAPES

def tell(form, variant):
    numbers = {name for name, kind in variant.arguments.items() if isinstance(kind, str)}
    for parameter in variant.kernel.params:
        assert parameter.do_not_specialize or parameter.name not in numbers, parameter.name
        assert parameter.name in {*variant.arguments, *variant.constants, "PDL"}, parameter.name
    usage, compiled, block_t = measure(variant, 90), variant.compile(90), variant.constants.get("BLOCK_T")
    waits = [int(wait) for wait in re.findall(r"async_wait %.*{num = (\\d+)", compiled.asm["ttgir"])]
    products = sorted(set(re.findall(r"(?:wgmma.mma_async|mma)\\.sync\\.aligned\\S*", compiled.asm["ptx"])))
    return [form, usage.name, block_t, usage.shared_bytes, usage.spilled_bytes, waits, products]

shape = SHAPES["Qwen3-0.6B"]
forms = {form: quantized_variants(shape, form) for form in QUANTIZED}
forms["floats"] = float_variants(replace(shape, deterministic=True))
wanted = {variant: form for form, variants in forms.items() for variant in variants
          if (variant.constants.get("ROWS", 1024), variant.constants.get("COLUMNS", 2048)) == (1024, 2048)
          and (form != "int4-ordered" or "BLOCK_T" not in variant.constants)}  # whose products are those of int4
with ThreadPoolExecutor() as threads:
    for told in threads.map(tell, wanted.values(), wanted):
        print(json.dumps(told))
"""

# What tensor cores multiply, of what is not turned into bfloat16; of fp8, Hopper has only the wide instructions.
NARROW = {"int8-inputs": "s32.s8.s8", "fp8": "f32.e4m3.e4m3", "fp8-blocks": "f32.e4m3.e4m3"}
NARROW_FEW = {**NARROW, "fp8": "f32.f16.f16", "fp8-blocks": "f32.f16.f16"}


def test_products_read_ahead_and_use_tensor_cores():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    told = [json.loads(line) for line in printed.splitlines()]
    assert {form for form, *_ in told} == {*ahead.QUANTIZED, "floats"}
    # Of floats there is one size of tile; those of int4-ordered are int4's.
    assert sum(block_t is not None for _, _, block_t, *_ in told) == 5 * (len(ahead.QUANTIZED) - 1) + 1
    for form, name, block_t, shared, spilled, waits, products in told:
        assert shared <= MAX_SHARED, name
        assert spilled == 0, name
        if block_t is None:  # what makes inputs, or joins parts
            continue
        assert min(waits) >= 2, name  # at least one more block is under way
        assert products, name
        for instruction in products:
            assert instruction.startswith("wgmma") == (block_t >= 64), name
            narrow = NARROW if block_t >= 64 else NARROW_FEW
            assert narrow.get(form, "f32.bf16.bf16") in instruction, (name, instruction)


@pytest.mark.parametrize("quantization", ahead.QUANTIZED)
def test_products_of_a_model_are_named(quantization, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "measure", lambda variant, capability: KernelResources(describe(variant), 1, 32, 0))
    ahead.main(["Llama-3.1-8B", "--quantization", quantization])
    lines = [line for line in capsys.readouterr().out.splitlines() if "gemm_kernel" in line]
    for rows, columns in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        assert sum(f"ROWS={rows} COLUMNS={columns} " in line for line in lines) >= 4
