"""Compiles kernels ahead of time and prints the shared memory and registers that each needs. Needs no GPU."""

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
from penstock.kernels.cuda.core.launch import ALIGNMENT, FP8_CAPABILITY, TYPES, KernelVariant, has_wide_products
from penstock.kernels.cuda.example_shapes import SHAPES
from penstock.kernels.cuda.gemv import gemv_variant
from penstock.kernels.cuda.latent_kv import LatentShape, latent_kv_variant
from penstock.kernels.cuda.lora import lora_expand_variant, lora_shrink_variant
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.cuda.moe.fused_moe import fused_moe_variants
from penstock.kernels.cuda.moe.grouped_mm import grouped_moe_variants, has_grouped_mm
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.kernels.cuda.norm import add_rms_norm_variant, rms_norm_variant
from penstock.kernels.cuda.quantized.gemm import gemm_variants
from penstock.kernels.cuda.quantized.weights import Codes, WeightLayout
from penstock.kernels.cuda.recurrent.shapes import recurrent_variants
from penstock.kernels.cuda.rope_kv import rope_kv_variant
from penstock.kernels.cuda.sampling.logprobs import logprobs_variants
from penstock.kernels.cuda.sampling.sample import sampling_variants
from penstock.kernels.cuda.skinny_gemm import skinny_gemm_variants
from penstock.kernels.cuda.step import MIN_SEQUENCES, commit_variant, prepare_variant
from penstock.kernels.cuda.window_slots import window_slots_variant

MAX_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""The limit for one program, by compute capability."""

QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"codes": Codes.INT8},
    "int8-inputs": {"codes": Codes.INT8, "narrows_inputs": True},
    "fp8": {"codes": Codes.FP8, "narrows_inputs": True},
    "fp8-blocks": {"codes": Codes.FP8, "narrows_inputs": True, "group": 128},
    "fp8-weights": {"codes": Codes.FP8},
    "int4": {"codes": Codes.INT4, "group": 128},
    "int4-ordered": {"codes": Codes.INT4, "group": 128, "is_ordered": True},
}
"""The kinds of quantised weights, each with the fields that its layouts share."""


def variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """All kernels that a model of this shape launches, except the matrix products with the weights of layers."""
    yield from _norm_variants(shape)
    yield from _unquantized_variants(shape)
    if shape.experts is not None:
        yield from fused_moe_variants(ExpertsShape.of(shape))
    for kind in shape.kinds:
        if kind.intermediate_size is not None:
            yield gated_activation_variant(kind.dtype, kind.intermediate_size, kind.activation)
        if kind.latent is None:
            yield rope_kv_variant(kind.heads)
        else:
            yield from _latent_variants(kind, kind.latent)
    for recurrent in shape.recurrent:
        yield from recurrent_variants(recurrent, commits=shape.commits_states, deterministic=shape.deterministic)
    sequences = MIN_SEQUENCES  # and one variant for each power of 2, up to the first that suffices
    of_rows = (shape.max_pages, shape.max_positions, shape.slots, shape.vocab_size)
    yield prepare_variant(sequences, *of_rows)
    while sequences < shape.max_sequences:
        sequences *= 2
        yield prepare_variant(sequences, *of_rows)
    if shape.num_window_groups:
        yield window_slots_variant(shape.max_sequences, shape.num_window_groups, shape.max_pages, shape.slots)
    for attention in shape.attention():
        yield from attention_variants(attention)
    sampler = shape.sampler()
    yield from sampling_variants(sampler)
    yield from logprobs_variants(sampler)
    if shape.lora_rank:
        yield from _lora_variants(shape)
    yield accept_variant(sampler)
    yield commit_variant()


def _latent_variants(shape: ModelShape, latent: LatentShape) -> Iterator[KernelVariant]:
    """What latent attention has in place of ``rope_kv``."""
    row, queries = latent.first_rows(shape.num_heads), shape.num_heads * latent.qk_head_dim
    rank = latent.q_lora_rank
    if rank is not None:
        yield rms_norm_variant(shape.dtype, rank, row, rank, latent.norm_eps)
    yield latent_kv_variant(latent, shape.dtype, shape.num_heads, row, row if rank is None else queries)


def _lora_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """The products of LoRA adapters with the linears of layers."""
    rank = shape.lora_rank
    for kind in shape.kinds:
        query, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
        num_kv = 0 if not kind.has_kv else 1 if kind.values_are_keys else 2
        ends = tuple(kv * number for number in range(1, num_kv + 1))
        if not kind.gated_attention:  # with it, queries have no adapters
            ends = query, *(query + end for end in ends)
        linears = [(kind.hidden_size, ends), (query, (kind.hidden_size,))]
        if kind.latent is not None:  # only the output's
            linears = [(kind.num_heads * kind.latent.v_head_dim, (kind.hidden_size,))]
        if kind.intermediate_size is not None:
            inner = kind.intermediate_size
            linears += [(kind.hidden_size, (inner, 2 * inner)), (inner, (kind.hidden_size,))]
        for columns, ends in linears:
            yield lora_shrink_variant(kind.dtype, columns, len(ends) * rank)
            yield lora_expand_variant(kind.dtype, ends, rank)


def _norm_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    dtype, hidden, eps = shape.dtype, shape.hidden_size, shape.norm_eps
    if shape.norms_before:
        # The first layer's norm.
        yield rms_norm_variant(dtype, hidden, hidden, hidden, eps)
    if shape.ends_layers or not shape.norms_before:
        yield add_rms_norm_variant(dtype, hidden, eps, norms_delta=shape.norms_after, norms_sum=False)
    # The norms of the other layers, and the model's last norm.
    if not (shape.ends_layers and shape.has_mlp_beside_experts):
        yield add_rms_norm_variant(dtype, hidden, eps, norms_delta=shape.norms_after, norms_sum=True)
    if shape.norms_queries:
        row = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        for heads in (shape.num_heads, shape.num_kv_heads):
            yield rms_norm_variant(dtype, heads * shape.head_dim, row, row, eps)


def _products(shape: ModelShape) -> list[tuple[int, int, bool]]:
    """The matrix products of layers of all sizes, each once."""
    return list(dict.fromkeys(product for kind in shape.kinds for product in kind.products))


def float_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """Matrix products with the weights of layers, if these are not quantised."""
    for kind in shape.kinds:
        products = list(kind.products)
        if kind.gate_up is not None and not shape.deterministic:
            products.remove(kind.gate_up)
            yield from _few_tokens_product(shape, *kind.gate_up, kind.activation)
        for product in products:
            yield from _float_product(shape, *product)


def _unquantized_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """Matrix products with weights that are never quantised."""
    num_logits = shape.num_logits or shape.vocab_size
    yield from _float_product(shape, num_logits, shape.hidden_size, is_biased=False, max_tokens=shape.max_sampled)
    if shape.experts is not None:
        yield from _float_product(shape, shape.experts.num_experts, shape.hidden_size, shape.experts.biased)


def _float_product(
    shape: ModelShape, rows: int, columns: int, is_biased: bool, max_tokens: int | None = None
) -> Iterator[KernelVariant]:
    """One matrix product: of few tokens, or of any number of tokens if the model is deterministic."""
    if shape.deterministic:
        layout = WeightLayout(Codes(shape.dtype), rows, columns)
        yield from gemm_variants(layout, shape.dtype, shape.max_tokens, deterministic=True, is_biased=is_biased)
    else:
        yield from _few_tokens_product(shape, rows, columns, is_biased, max_tokens=max_tokens)


def _few_tokens_product(
    shape: ModelShape,
    rows: int,
    columns: int,
    is_biased: bool,
    activation: str | None = None,
    max_tokens: int | None = None,
) -> Iterator[KernelVariant]:
    """The products of one token and of a few, up to ``max_tokens`` (None: those of a step). torch computes them if the
    weight's rows are not aligned."""
    if columns * shape.dtype.itemsize % ALIGNMENT == 0:
        yield gemv_variant(shape.dtype, columns, activation, is_biased=is_biased)
        if shape.dtype.itemsize == 2:
            most = max_tokens or shape.max_tokens
            yield from skinny_gemm_variants(shape.dtype, rows, columns, most, activation, is_biased=is_biased)


def measured_variants(shape: ModelShape) -> Iterator[KernelVariant]:
    """What a model launches besides ``variants`` where torch is measured to be faster."""
    experts = None if shape.experts is None else ExpertsShape.of(shape)
    if experts is not None and has_grouped_mm(experts, torch.device("cpu")):
        yield from grouped_moe_variants(experts)


def quantized_variants(shape: ModelShape, quantization: str) -> Iterator[KernelVariant]:
    """Matrix products with the weights of a layer, for one of the kinds in ``QUANTIZED``."""
    for rows, columns, is_biased in _products(shape):
        layout = WeightLayout(rows=rows, columns=columns, **QUANTIZED[quantization])
        for deterministic in (False, True):
            yield from gemm_variants(
                layout, shape.dtype, shape.max_tokens, deterministic=deterministic, is_biased=is_biased
            )


@dataclass(frozen=True)
class KernelResources:
    """The resources that one program of a variant needs."""

    name: str
    """The kernel, the types of its tensors, and its constants."""
    shared_bytes: int
    registers: int
    """Registers per thread."""
    spilled_bytes: int
    """Bytes of local memory per thread, used where registers run out or values are indexed."""


def wanted(shapes: Iterable[ModelShape]) -> dict[str, KernelVariant]:
    """All variants that those models launch, by description and without duplicates. Includes fp8 KV and deterministic
    mode, which models with latent attention do not have, and LoRA adapters."""
    found: dict[str, KernelVariant] = {}
    for shape in shapes:
        others = [replace(shape, kv_dtype=torch.float8_e4m3fn, lora_rank=16), replace(shape, deterministic=True)]
        if shape.latent is not None:
            others = [replace(shape, lora_rank=16)]
        for each in (shape, *others):
            for variant in chain(variants(each), float_variants(each), measured_variants(each)):
                found.setdefault(describe(variant), variant)
    return found


def shape_for(shape: ModelShape, capability: int) -> ModelShape:
    """Returns the shape that a model has on GPUs of a compute capability."""
    wide = has_wide_products(capability)
    others = tuple(replace(other, wide_products=wide) for other in shape.others)
    return replace(shape, others=others, wide_products=wide)


def describe(variant: KernelVariant) -> str:
    """A line that identifies the variant. Leaves out dtypes among the constants, since they follow from the tensors'
    dtypes."""
    types = dict.fromkeys(TYPES[kind] for kind in variant.arguments.values() if isinstance(kind, torch.dtype))
    values = {**variant.absent, **variant.constants}.items()
    constants = (f"{name}={value}" for name, value in values if not isinstance(value, tl.dtype))
    sizes = f"WARPS={variant.num_warps} STAGES={variant.num_stages}"
    return f"{variant.kernel.fn.__name__} {','.join(types)} {' '.join(constants)} {sizes}"


def runs_on(variant: KernelVariant, capability: int) -> bool:
    """Whether GPUs of a compute capability have the types of a variant."""
    return capability >= FP8_CAPABILITY or torch.float8_e4m3fn not in variant.arguments.values()


def supports_quantization(quantization: str, capability: int) -> bool:
    """Whether GPUs of a compute capability support a kind in ``QUANTIZED``."""
    return capability >= FP8_CAPABILITY or QUANTIZED[quantization]["codes"] is not Codes.FP8


def measure(variant: KernelVariant, capability: int) -> KernelResources:
    """Compiles the variant, with as many of its stages as fit, and reads the figures from the machine code."""
    compiled = variant.compile(capability)
    while compiled.metadata.shared > MAX_SHARED_BYTES[capability] and variant.num_stages > 1:
        variant = replace(variant, num_stages=variant.num_stages - 1)
        compiled = variant.compile(capability)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output)}
    spilled = figures["STACK"] + figures["LOCAL"]
    return KernelResources(describe(variant), int(compiled.metadata.shared), figures["REG"], spilled)


def settle_keys(compiled: Iterable[KernelVariant]) -> None:
    """Computes the cache keys in order, before threads compile in any order. The key by which Triton finds a compiled
    kernel on disk depends on which keys were computed before it."""
    for variant in compiled:
        if isinstance(variant.kernel, JITFunction):
            assert variant.kernel.cache_key


def main(arguments: list[str] | None = None) -> None:
    """Exits with status 1 if a variant needs more shared memory than the GPU has."""
    parser = argparse.ArgumentParser(prog="python -m penstock.kernels.aot", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"one of {', '.join(SHAPES)} (default: all)")
    parser.add_argument(
        "--capability", type=int, default=90, choices=sorted(MAX_SHARED_BYTES), help="90 (default): Hopper"
    )
    parser.add_argument("--quantization", choices=QUANTIZED, help="compile only the products with weights of this kind")
    parser.add_argument(
        "--kernels", default="", metavar="REGEX", help="compile only variants whose line matches: decode_kernel"
    )
    options = parser.parse_args(arguments)
    unknown = [model for model in options.models if model not in SHAPES]
    if unknown:
        parser.error(f"no such model: {unknown[0]}")
    if options.quantization and not supports_quantization(options.quantization, options.capability):
        parser.error(f"--quantization {options.quantization}: needs --capability {FP8_CAPABILITY} or higher")
    try:
        wanted_kernels = re.compile(options.kernels)
    except re.error as error:
        parser.error(f"--kernels: not a regular expression: {error}")
    limit = MAX_SHARED_BYTES[options.capability]
    shapes = [shape_for(SHAPES[name], options.capability) for name in options.models or SHAPES]
    if options.quantization is None:
        compiled = list(wanted(shapes).values())
    else:
        products = chain.from_iterable(quantized_variants(shape, options.quantization) for shape in shapes)
        compiled = list({describe(variant): variant for variant in products}.values())
    compiled = [
        variant
        for variant in compiled
        if runs_on(variant, options.capability) and wanted_kernels.search(describe(variant))
    ]
    if options.kernels and not compiled:
        parser.error(f"--kernels: no variant matches {options.kernels}; without it, all are listed")
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
