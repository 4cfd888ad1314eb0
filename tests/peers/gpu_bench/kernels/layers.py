"""The kernels of a layer that have no file of their own: norms, the gate, rotation, products, and a step's tensors."""

from functools import partial

import torch
from torch import Tensor

from gpu_bench.kernels.cases import ULP, Case, Make, distance
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.activation import gated_activation
from penstock.kernels.cuda.norm import add_rms_norm, rms_norm
from penstock.kernels.cuda.quantized.gemm import GemmWorkspace, gemm
from penstock.kernels.cuda.quantized.weights import keep_floats
from penstock.kernels.cuda.rope_kv import rope_kv
from penstock.kernels.cuda.step import DeviceRows, StepTensors, commit, prepare
from penstock.kernels.reference import fused as reference_cuda, ops as reference


def norm(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """rms_norm."""
    shape, tokens = model.shape, sizes.kernels.tokens
    x = torch.randn(tokens, shape.hidden_size, device=device).to(shape.dtype)
    weight, y = torch.rand(shape.hidden_size, device=device) + 0.5, torch.empty_like(x)
    run = partial(rms_norm, x, weight, shape.norm_eps, y)

    def error() -> float:
        run()
        return distance(y, reference.rms_norm(x.float(), weight, shape.norm_eps))

    return Case("rms_norm", f"{tokens} tokens", error, ULP[shape.dtype], run, 2 * x.nbytes)


def added_norm(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """add_rms_norm, of the residual stream and what is added to it."""
    shape, tokens = model.shape, sizes.kernels.tokens
    x, delta = (torch.randn(tokens, shape.hidden_size, device=device).to(shape.dtype) for _ in range(2))
    weight, y = torch.rand(shape.hidden_size, device=device) + 0.5, torch.empty_like(x)
    run = partial(add_rms_norm, x, delta, shape.norm_eps, weight=weight, y=y)

    def error() -> float:
        total = reference_cuda.add_rms_norm(x.float(), delta.float(), shape.norm_eps)
        run()
        return max(distance(x, total), distance(y, reference.rms_norm(total, weight, shape.norm_eps)))

    return Case("add_rms_norm", f"{tokens} tokens", error, ULP[shape.dtype], run, 4 * x.nbytes)


def gate(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """gated_activation."""
    shape, tokens = model.shape, sizes.kernels.tokens
    gate_up = torch.randn(tokens, 2 * model.intermediate_size, device=device).to(shape.dtype)
    out = gate_up.new_empty(tokens, model.intermediate_size)
    run = partial(gated_activation, gate_up, shape.activation, out)

    def error() -> float:
        run()
        return distance(out, reference.gated_activation(gate_up.float(), shape.activation))

    text = f"{tokens} tokens, {shape.activation}"
    return Case("gated_activation", text, error, ULP[shape.dtype], run, gate_up.nbytes + out.nbytes)


def rotation(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """rope_kv: queries and keys normed and turned, keys and values stored."""
    shape, tokens = model.shape, sizes.kernels.tokens
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(tokens, heads * shape.head_dim, device=device).to(shape.dtype)
    angles = torch.rand(shape.max_positions, shape.rotary_dim // 2, device=device) * 6.28
    cosines, sines = angles.cos(), angles.sin()
    positions = torch.randint(shape.max_positions, (tokens,), dtype=torch.int32, device=device)
    slots = torch.randperm(tokens, device=device)
    query = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
    num_pages = -(-tokens // shape.slots)
    pages = torch.zeros(num_pages, 2, shape.num_kv_heads, shape.slots, shape.head_dim, device=device)
    stored = pages.to(shape.dtype)
    normed = None
    if shape.norms_heads:
        weights = torch.rand(2, shape.head_dim, device=device) + 0.5
        normed = (weights[0].clone(), weights[1].clone(), shape.norm_eps)
    run = partial(rope_kv, qkv, cosines, sines, positions, slots, query, stored, norm=normed)

    def error() -> float:
        expected = reference_cuda.rope_kv(qkv.float(), cosines, sines, positions, slots, pages, normed, None)
        run()
        return max(distance(query, expected), distance(stored, pages))

    return Case("rope_kv", f"{tokens} tokens", error, ULP[shape.dtype], run, 2 * qkv.nbytes)


def preparation(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """prepare, and commit after it: a step in which every row decodes."""
    shape, batch, context = model.shape, sizes.kernels.batch, sizes.kernels.context
    max_pages = -(-(context + 1) // shape.slots)
    tables = torch.randperm(batch * max_pages, dtype=torch.int32, device=device).view(batch, max_pages)
    lengths = torch.randint(context, (batch,), dtype=torch.int32, device=device)

    def integers(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(size, value, dtype=dtype, device=device)

    next_tokens = torch.randint(shape.vocab_size, (batch,), dtype=torch.int32, device=device)
    rows = DeviceRows(tables, lengths.clone(), next_tokens, integers(batch, context + 1))
    step = StepTensors(
        rows=torch.randperm(batch, dtype=torch.int32, device=device),
        num_queries=integers(batch, value=1),
        given=integers(batch, value=-1),
        token_ids=integers(batch),
        positions=integers(batch),
        slots=integers(batch, dtype=torch.int64),
        query_starts=integers(batch + 1),
        contexts=integers(batch),
    )
    kept, sampled = integers(batch), integers(batch, value=-1)

    def run() -> None:
        prepare(rows, step, shape.slots, shape.vocab_size)
        commit(rows, step, kept, sampled)  # keeps nothing, so that every run is the same

    def error() -> float:
        run()
        expected = reference_cuda.prepare(
            step.rows.tolist(),
            step.num_queries.tolist(),
            step.given.tolist(),
            tables.tolist(),
            lengths.tolist(),
            next_tokens.tolist(),
            shape.slots,
            shape.vocab_size,
        )
        made = (step.token_ids, step.positions, step.slots, step.query_starts, step.contexts)
        return float(any(one.tolist() != other for one, other in zip(made, expected, strict=True)))

    return Case("prepare, commit", f"{batch} rows", error, 0.0, run, 40 * batch)


def floats_product(model: Model, sizes: Sizes, device: torch.device, *, is_prompt: bool) -> Case:
    """gemm, of the MLP's last matrix, as --deterministic has it."""
    shape, tokens = model.shape, sizes.kernels.tokens if is_prompt else sizes.kernels.batch
    x = torch.randn(tokens, model.intermediate_size, device=device).to(shape.dtype)
    matrix = torch.randn(shape.hidden_size, model.intermediate_size, device=device).to(shape.dtype)
    weight, out = keep_floats(matrix), x.new_empty(tokens, shape.hidden_size)
    room = GemmWorkspace.allocate([weight.layout], x.dtype, tokens, device, deterministic=True)
    run = partial(gemm, x, weight, out, room)

    def error() -> float:
        run()
        return distance(out, x.float() @ matrix.float().T)

    read, operations = x.nbytes + matrix.nbytes + out.nbytes, 2.0 * tokens * matrix.numel()
    return Case("gemm", f"{tokens} tokens, deterministic", error, ULP[shape.dtype], run, read, operations)


def dense_product(model: Model, sizes: Sizes, device: torch.device, *, matrix: str, tokens: int) -> Case:
    """torch's product with one of the model's matrices, as steps without quantised weights have it."""
    shape = model.shape
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    rows, columns = {
        "qkv": (heads, shape.hidden_size),
        "o": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "gate_up": (2 * model.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, model.intermediate_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }[matrix]
    x = torch.randn(tokens, columns, device=device).to(shape.dtype)
    weight = torch.randn(rows, columns, device=device).to(shape.dtype)
    out = x.new_empty(tokens, rows)
    run = partial(torch.mm, x, weight.t(), out=out)

    def error() -> float:
        run()
        return distance(out, x.float() @ weight.float().T)

    read, operations = x.nbytes + weight.nbytes + out.nbytes, 2.0 * tokens * weight.numel()
    return Case(f"torch.mm {matrix}", f"{tokens} tokens", error, ULP[shape.dtype], run, read, operations)


DENSE = [
    partial(dense_product, matrix=matrix, tokens=tokens)
    for matrix, counts in {
        **dict.fromkeys(("qkv", "o", "gate_up", "down"), (1, 32, 256, 2048)),
        "head": (1, 32, 256),
    }.items()
    for tokens in counts
]
CASES: list[Make] = [
    norm,
    added_norm,
    gate,
    rotation,
    preparation,
    partial(floats_product, is_prompt=False),
    partial(floats_product, is_prompt=True),
]
