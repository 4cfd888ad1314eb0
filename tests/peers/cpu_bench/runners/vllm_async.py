"""vLLM's CPU build through its own asynchronous engine, in this process and its children; with zentorch if wanted."""

import argparse
import asyncio
from importlib.metadata import version

import torch
import vllm
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from cpu_bench.runners.torch_dtype import fastest_dtype, name_of
from cpu_bench.schedule import AddTokens, Arrival, send_all
from cpu_bench.wire import Ready, Unsupported, Wire, run_engine


async def _serve(wire: Wire, arguments: argparse.Namespace, more: str) -> None:
    dtype = name_of(fastest_dtype())
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=32,
            enable_prefix_caching=True,
            kv_cache_dtype=arguments.kv_cache_dtype,
            generation_config="vllm",
        )
    )
    wire.ready(Ready(f"vllm {vllm.__version__}, torch {torch.__version__}, {dtype}{more}"))
    set_number = 0

    async def generate(arrival: Arrival, add_tokens: AddTokens) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = TokensPrompt(prompt_token_ids=arrival.prompt)
        async for output in engine.generate(prompt, sampling, f"{set_number}-{arrival.number}"):
            add_tokens(output.outputs[0].token_ids)

    sets = wire.sets()
    while (work := await asyncio.to_thread(next, sets, None)) is not None:
        set_number += 1
        wire.answer((await send_all(work, generate)).ran())
    engine.shutdown()


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Threads are bound by environment variables, which the driver sets. If vLLM does not use zentorch, it falls back
    to its own kernels without an error, and if its build lacks a product, only its log says so. Both are checked
    here."""
    is_zen = bool(current_platform.is_zen_cpu())
    if arguments.zentorch and not is_zen:
        raise Unsupported("vLLM uses zentorch only on AMD processors with AVX512")
    if is_zen and not arguments.zentorch:
        raise RuntimeError("vLLM found a zentorch that is not meant for this variant")
    if arguments.model.endswith("-w4a16") and not is_zen:
        current_platform.import_kernels()
        if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
            raise Unsupported("vLLM's build for processors without AVX512 has no products for W4A16")
    asyncio.run(_serve(wire, arguments, f", zentorch {version('zentorch')}" if is_zen else ""))


if __name__ == "__main__":
    run_engine(main, zentorch="", kv_cache_dtype="auto")
