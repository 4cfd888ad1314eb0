"""Compiles kernels ahead of time, for a GPU that need not be there, and prints what each takes of it."""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton import JITFunction, knobs

from penstock.kernels.cuda.accept_drafts import accept_variant
from penstock.kernels.cuda.activation import gated_activation_variant
from penstock.kernels.cuda.attention.paged import attention_variants
from penstock.kernels.cuda.core.launch import TYPES, KernelVariant
from penstock.kernels.cuda.model_shapes import SHAPES, ModelShape
from penstock.kernels.cuda.moe.fused_moe import experts_variants
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.kernels.cuda.norm import add_rms_norm_variant, rms_norm_variant
from penstock.kernels.cuda.quantized.gemm import product_variants
from penstock.kernels.cuda.quantized.weights import Codes, WeightLayout
from penstock.kernels.cuda.rope_kv import RopeKv, rope_kv_variant
from penstock.kernels.cuda.sampling.logprobs import logprobs_variants
from penstock.kernels.cuda.sampling.sample import sampling_variants
from penstock.kernels.cuda.step import MIN_SEQUENCES, commit_variant, prepare_variant

MAX_SHARED_BYTES = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of a program, by compute capability."""

QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"codes": Codes.INT8},
    "int8-inputs": {"codes": Codes.INT8, "narrows_inputs": True},
    "fp8": {"codes": Codes.FP8, "narrows_inputs": True},
    "fp8-blocks": {"codes": Codes.FP8, "narrows_inputs": True, "group": 128},
    "fp8-weights": {"codes": Codes.FP8},
    "int4": {"codes": Codes.INT4, "group": 128},
    "int4-ordered": {"codes": Codes.INT4, "group": 128, "is_ordered": True},
}
"""Weights that a model may have quantised: what their layouts have in common."""


def variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """All that a model of that shape launches, but for products of quantised weights."""
    yield from _norm_variants(shape)
    if shape.deterministic:
        yield from float_variants(shape)
    if shape.intermediate_size is not None:
        yield gated_activation_variant(shape.dtype, shape.intermediate_size, shape.activation)
    if shape.experts is not None:
        yield from experts_variants(ExpertsShape.of(shape))
    yield rope_kv_variant(
        RopeKv(
            dtype=shape.dtype,
            kv_dtype=shape.kv_dtype,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=shape.rotary_dim,
            slots=shape.slots,
            norm_eps=shape.norm_eps if shape.norms_heads else None,
        )
    )
    sequences = MIN_SEQUENCES  # and a form for each power of 2 up to the first that is enough
    of_rows = (shape.max_pages, shape.max_positions, shape.slots, shape.vocab_size)
    yield prepare_variant(sequences, *of_rows)
    while sequences < shape.max_sequences:
        sequences *= 2
        yield prepare_variant(sequences, *of_rows)
    for attention in shape.attention():
        yield from attention_variants(attention)
    sampler = shape.sampler()
    yield from sampling_variants(sampler)
    yield from logprobs_variants(sampler)
    yield accept_variant(sampler)
    yield commit_variant()


def _norm_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    dtype, hidden, eps = shape.dtype, shape.hidden_size, shape.norm_eps
    if shape.norms_before:
        # What the first layer begins with.
        yield rms_norm_variant(dtype, hidden, hidden, hidden, eps)
    else:
        yield add_rms_norm_variant(dtype, hidden, eps, norms_delta=shape.norms_after, norms_sum=False)
    # The other layers, or the model's last norm.
    yield add_rms_norm_variant(dtype, hidden, eps, norms_delta=shape.norms_after, norms_sum=True)
    if shape.norms_queries:
        row = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        for heads in (shape.num_heads, shape.num_kv_heads):
            yield rms_norm_variant(dtype, heads * shape.head_dim, row, row, eps)


def float_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """Products of weights that are not quantised."""
    products = [*shape.products, (shape.num_logits or shape.vocab_size, shape.hidden_size, False)]
    if shape.experts is not None:
        products.append((shape.experts.num_experts, shape.hidden_size, shape.experts.biased))
    for rows, columns, is_biased in products:
        layout = WeightLayout(Codes(shape.dtype), rows, columns)
        yield from product_variants(layout, shape.dtype, shape.max_tokens, deterministic=True, is_biased=is_biased)


def quantized_variants(shape: ModelShape, quantization: str) -> Iterator[KernelVariant]:
    """Products of the weights of a layer, if they are so ``QUANTIZED``."""
    for rows, columns, is_biased in shape.products:
        layout = WeightLayout(rows=rows, columns=columns, **QUANTIZED[quantization])
        for deterministic in (False, True):
            yield from product_variants(
                layout, shape.dtype, shape.max_tokens, deterministic=deterministic, is_biased=is_biased
            )


@dataclass(frozen=True)
class KernelResources:
    """What a program of a variant takes."""

    name: str
    """The kernel, the types of its tensors, and its constants."""
    shared_bytes: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread: what is kept in local memory, for want of registers or because it is indexed."""


def wanted(shapes: Iterable[ModelShape]) -> dict[str, KernelVariant]:
    """All that those models launch, each once, by its description; also with fp8 KV, and where bits are kept."""
    found: dict[str, KernelVariant] = {}
    for shape in shapes:
        others = replace(shape, kv_dtype=torch.float8_e4m3fn), replace(shape, deterministic=True)
        for variant in chain.from_iterable(map(variants, (shape, *others))):
            found.setdefault(describe(variant), variant)
    return found


def describe(variant: KernelVariant) -> str:
    """A line that no other variant has. What dtypes are among its constants follows from those of its tensors."""
    types = dict.fromkeys(TYPES[kind] for kind in variant.arguments.values() if isinstance(kind, torch.dtype))
    constants = (f"{name}={value}" for name, value in variant.constants.items() if not isinstance(value, tl.dtype))
    sizes = f"WARPS={variant.num_warps} STAGES={variant.num_stages}"
    return f"{variant.kernel.fn.__name__} {','.join(types)} {' '.join(constants)} {sizes}"


def measure(variant: KernelVariant, capability: int) -> KernelResources:
    """Compiles it; the figures are those of the machine code."""
    compiled = variant.compile(capability)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    spilled = figures["STACK"] + figures["LOCAL"]
    return KernelResources(describe(variant), int(compiled.metadata.shared), figures["REG"], spilled)


def settle_keys(compiled: Iterable[KernelVariant]) -> None:
    """The key by which Triton finds a compiled kernel on disk depends on what was asked for its key before it: so it
    is done in order, before threads compile in any order."""
    for variant in compiled:
        if isinstance(variant.kernel, JITFunction):
            assert variant.kernel.cache_key


def main(arguments: list[str] | None = None) -> None:
    """Ends with status 1 where a variant needs more shared memory than there is."""
    parser = argparse.ArgumentParser(prog="python -m penstock.kernels.aot", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SHAPES)}; all of them by default")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(MAX_SHARED_BYTES), help="90 is Hopper's")
    parser.add_argument("--quantization", choices=QUANTIZED, help="only the products of weights quantised so")
    options = parser.parse_args(arguments)
    unknown = [model for model in options.models if model not in SHAPES]
    if unknown:
        parser.error(f"no such model: {unknown[0]}")
    limit = MAX_SHARED_BYTES[options.capability]
    shapes = [SHAPES[name] for name in options.models or SHAPES]
    if options.quantization is None:
        compiled = list(wanted(shapes).values())
    else:
        products = chain.from_iterable(quantized_variants(shape, options.quantization) for shape in shapes)
        compiled = list({describe(variant): variant for variant in products}.values())
    sys.stdout.write(f"{'shared':>7} {'registers':>9} {'spilled':>7}  of {limit} bytes of shared memory\n")
    too_large = []
    settle_keys(compiled)
    with ThreadPoolExecutor() as threads:
        for usage in threads.map(lambda variant: measure(variant, options.capability), compiled):
            sys.stdout.write(f"{usage.shared_bytes:>7} {usage.registers:>9} {usage.spilled_bytes:>7}  {usage.name}\n")
            if usage.shared_bytes > limit:
                too_large.append(usage.name)
    if too_large:
        sys.exit(f"too much shared memory: {'; '.join(too_large)}")


if __name__ == "__main__":
    main()
