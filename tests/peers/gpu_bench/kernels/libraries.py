"""What libraries take for the work of our kernels: attention by FlashInfer and FlashAttention 3, on the same pages, if
they are installed; and torch's products in fp8 and of experts. Each has our kernel beside it."""

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from gpu_bench.kernels.attention import Step, shape_of_step
from gpu_bench.kernels.cases import ULP, Case, Make, distance
from gpu_bench.kernels.experts import mixture
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.quantized.gemm import GemmWorkspace, gemm
from penstock.kernels.cuda.quantized.inputs import narrow_inputs
from penstock.kernels.cuda.quantized.quantize import quantize_fp8
from penstock.kernels.reference.fused import dequantize
from penstock.models.backends.cuda.attention_libraries import LIBRARIES


def attention(model: Model, sizes: Sizes, device: torch.device, *, library: str, decodes: bool) -> Case:
    """A library's attention in a layer, with its own preparation of a step."""
    kernels = sizes.kernels
    rows, context = (kernels.batch, kernels.context) if decodes else (1, kernels.prompt)
    queries = 1 if decodes else context
    checked = [(1, kernels.checked)] if decodes else [(kernels.checked, kernels.checked)]
    shape = shape_of_step(model, 1)
    step, small = (Step.make(shape, lengths, device) for lengths in ([(queries, context)] * rows, checked))
    if find_spec(LIBRARIES[library].module) is None:
        raise ModuleNotFoundError(f"{LIBRARIES[library].module} is not installed")
    of_model = LIBRARIES[library].make(model.shape, device)

    def run(each: Step) -> None:
        longest = max(queries for queries, _ in each.lengths)
        of_model.plan(each.batch, longest)(None, each.query, each.kv, each.out, None)

    def error() -> float:
        run(small)
        return small.error_of(small.out)

    text = f"{rows} rows of {context}" if decodes else f"prompt of {context}"
    if not of_model.can_be_captured:
        # Only its kernels: the preparation waits for the device, which a graph cannot.
        attend = of_model.plan(step.batch, queries)
        work = partial(attend, None, step.query, step.kv, step.out)
    else:
        work = partial(run, step)
    return Case(f"{library} attention", text, error, ULP[model.shape.dtype], work, step.num_bytes, step.products)


def fp8_product(model: Model, sizes: Sizes, device: torch.device, *, is_prompt: bool, by_torch: bool) -> Case:
    """The product of the MLP's last matrix in fp8, with the inputs' quantisation."""
    shape, columns = model.shape, model.intermediate_size
    tokens = sizes.kernels.tokens if is_prompt else 8 * sizes.kernels.batch
    matrix = torch.randn(shape.hidden_size, columns, device=device).to(shape.dtype)
    x = torch.randn(tokens, columns, device=device).to(shape.dtype)
    weight, out = quantize_fp8(matrix), x.new_empty(tokens, shape.hidden_size)
    narrow = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(tokens, dtype=torch.float32, device=device)
    room = GemmWorkspace.allocate([weight.layout], x.dtype, tokens, device, deterministic=False)
    assert weight.scales is not None
    codes, weight_scales = weight.codes[:, :columns], weight.scales
    made: list[Tensor] = []

    def run() -> None:
        if not by_torch:
            gemm(x, weight, out, room)
            return
        narrow_inputs(x, narrow, scales)
        by_rows = functional.ScalingType.RowWise
        made[:] = [
            functional.scaled_mm(
                narrow, codes.t(), scales[:, None], by_rows, weight_scales.t(), by_rows, output_dtype=x.dtype
            )
        ]

    def error() -> float:
        run()
        narrow_inputs(x, narrow, scales)
        expected = (narrow.float() * scales[:, None]) @ dequantize(codes, weight_scales, None, 0, None).t()
        return distance(made[0] if by_torch else out, expected)

    name = "torch scaled_mm" if by_torch else "gemm"
    read, operations = x.nbytes + weight.codes.nbytes + out.nbytes, 2.0 * tokens * matrix.numel()
    return Case(name, f"{tokens} tokens, fp8", error, ULP[shape.dtype], run, read, operations)


CASES: list[Make] = [
    *(partial(attention, library=library, decodes=decodes) for library in LIBRARIES for decodes in (True, False)),
    *(
        partial(fp8_product, is_prompt=is_prompt, by_torch=each)
        for is_prompt in (False, True)
        for each in (False, True)
    ),
]
EXPERTS: list[Make] = [partial(mixture, decodes=False), partial(mixture, decodes=False, by_torch=True)]
