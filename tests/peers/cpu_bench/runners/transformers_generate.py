"""transformers in this process: requests one after another, as one padded batch, or by its continuous batching."""

import argparse
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList

from cpu_bench.wire import Ran, Ready, Request, Wire, run_engine

PAGE_SIZE = 32
KV_TOKENS = 24_576
"""Enough for every workload at once."""


class Stamps:
    """Stands in for a stopping criterion, which is called after each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def main(wire: Wire, arguments: argparse.Namespace) -> None:
    """Runs in the mode that the flag names."""
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True)
    ready = Ready(f"transformers {transformers.__version__}, torch {torch.__version__}")
    if arguments.mode == "continuous":
        _continuous(wire, model, ready)
        return
    wire.ready(ready)
    for requests in wire.sets():
        wire.answer((_sequential if arguments.mode == "sequential" else static)(model, requests))


def _sequential(model: Any, requests: list[Request]) -> Ran:
    began, events = time.perf_counter(), []
    for prompt, num_output in requests:
        ids = torch.tensor([prompt])
        events.append([(at, 1) for at in _generate(model, ids, torch.ones_like(ids), num_output)])
    return Ran(began, time.perf_counter(), events)


def static(model: Any, requests: list[Request]) -> Ran:
    """Padded to the longest prompt; the batch goes on until its longest output is done."""
    began = time.perf_counter()
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    times = _generate(model, ids.to(model.device), mask.to(model.device), max(num_output for _, num_output in requests))
    return Ran(began, time.perf_counter(), [[(at, 1) for at in times[:num_output]] for _, num_output in requests])


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, num_output: int) -> list[float]:
    stamps = Stamps()
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )  # fmt: skip
    return stamps.times


def _continuous(wire: Wire, model: Any, ready: Ready) -> None:
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=KV_TOKENS // PAGE_SIZE, max_batch_tokens=2048, max_requests_per_batch=64,
        default_compile_level=0,
    )  # fmt: skip
    generation = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=128)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        wire.ready(ready)
        for requests in wire.sets():
            began = time.perf_counter()
            names = [
                manager.add_request(prompt, max_new_tokens=num_output, record_timestamps=True)
                for prompt, num_output in requests
            ]
            done: dict[str, list[tuple[float, int]]] = {}
            while len(done) < len(names):
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    raise RuntimeError("the thread of continuous batching has ended")
                if output is not None and output.error:
                    raise RuntimeError(output.error)
                if output is not None and output.is_finished():
                    done[output.request_id] = [(at, 1) for at in output.timestamps]
            wire.answer(Ran(began, time.perf_counter(), [done[name] for name in names]))


if __name__ == "__main__":
    run_engine(main, mode="sequential")
