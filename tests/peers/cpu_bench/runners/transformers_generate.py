"""transformers in this process: requests one after another, as one padded batch, or by its continuous batching."""

import argparse
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList

from cpu_bench.runners.torch_dtype import fastest_dtype, name_of
from cpu_bench.schedule import Schedule
from cpu_bench.wire import Ran, Ready, Request, Wire, Work, run_engine

PAGE_SIZE = 32
KV_TOKENS = 24_576
"""Enough for every workload at once."""
BATCH_SIZE = 16
"""Requests in a static batch, at most."""


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
    dtype = fastest_dtype()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True)
    ready = Ready(f"transformers {transformers.__version__}, torch {torch.__version__}, {name_of(dtype)}")
    if arguments.mode == "continuous":
        _continuous(wire, model, ready)
        return
    wire.ready(ready)
    for work in wire.sets():
        wire.answer(_in_batches(model, work, 1 if arguments.mode == "sequential" else BATCH_SIZE))


def _in_batches(model: Any, work: Work, size: int) -> Ran:
    """Runs what has arrived as one batch, then what has arrived meanwhile as the next."""
    schedule = Schedule(work)
    while not schedule.is_over:
        batch = schedule.take_due(size)
        if not batch:
            schedule.sleep_to_next()
            continue
        times, outputs = _run_batch(model, [(arrival.prompt, arrival.num_output) for arrival in batch])
        for arrival, output in zip(batch, outputs, strict=True):
            for at, token in zip(times, output[: arrival.num_output], strict=False):
                schedule.add_tokens(arrival.number, [token], at)
            schedule.finish(arrival.number)
    return schedule.ran()


def static(model: Any, requests: list[Request]) -> Ran:
    """Runs one batch. It goes on until its longest output is done."""
    began = time.perf_counter()
    times, _ = _run_batch(model, requests)
    return Ran(began, time.perf_counter(), [[(at, 1) for at in times[:num_output]] for _, num_output in requests])


def _run_batch(model: Any, requests: list[Request]) -> tuple[list[float], list[list[int]]]:
    """Pads the prompts to the longest one; returns the time of each step, and the output of each request."""
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    num_output = max(num_output for _, num_output in requests)
    return _generate(model, ids.to(model.device), mask.to(model.device), num_output)


def _generate(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, num_output: int
) -> tuple[list[float], list[list[int]]]:
    stamps = Stamps()
    with torch.inference_mode():
        sequences = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )  # fmt: skip
    return stamps.times, sequences[:, ids.shape[1] :].tolist()


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
        for work in wire.sets():
            wire.answer(_run_continuous(manager, work))


def _run_continuous(manager: Any, work: Work) -> Ran:
    schedule = Schedule(work)
    numbers: dict[str, int] = {}
    while not schedule.is_over:
        for arrival in schedule.take_due():
            name = manager.add_request(arrival.prompt, max_new_tokens=arrival.num_output, record_timestamps=True)
            numbers[name] = arrival.number
        if not numbers:
            schedule.sleep_to_next()
            continue
        wait = schedule.seconds_to_next()
        output = manager.get_result(timeout=1 if wait is None else min(1, max(wait, 0.001)))
        if output is None and not manager.is_running():
            raise RuntimeError("the thread of continuous batching has ended")
        if output is not None and output.error:
            raise RuntimeError(output.error)
        if output is not None and output.is_finished():
            number = numbers.pop(output.request_id)
            for at, token in zip(output.timestamps, output.generated_tokens, strict=True):
                schedule.add_tokens(number, [token], at)
            schedule.finish(number)
    return schedule.ran()


if __name__ == "__main__":
    run_engine(main, mode="sequential")
