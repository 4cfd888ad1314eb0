"""vLLM's CPU build through its own asynchronous engine, in this process and its children."""

import argparse
import asyncio
import time

import torch
import vllm
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from cpu_bench.wire import Ran, Ready, Request, Wire, run_engine


async def _one(engine: AsyncLLM, name: str, request: Request) -> list[tuple[float, int]]:
    prompt, num_output = request
    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    return [
        (time.perf_counter(), len(output.outputs[0].token_ids))
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling, name)
        if output.outputs[0].token_ids
    ]


async def _serve(wire: Wire, arguments: argparse.Namespace) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=32,
            enable_prefix_caching=True,
            generation_config="vllm",
        )
    )
    wire.ready(Ready(f"vllm {vllm.__version__}, torch {torch.__version__}"))
    sets = wire.sets()
    number = 0
    while (requests := await asyncio.to_thread(next, sets, None)) is not None:
        number += 1
        began = time.perf_counter()
        events = await asyncio.gather(*(_one(engine, f"{number}-{i}", request) for i, request in enumerate(requests)))
        wire.answer(Ran(began, time.perf_counter(), list(events)))
    engine.shutdown()


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Its threads are bound by its environment variables, which the driver sets."""
    asyncio.run(_serve(wire, arguments))


if __name__ == "__main__":
    run_engine(main)
