"""transformers on the same device: its continuous batching and static batches, with made-up weights of the shape."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from cpu_bench.runners.transformers_generate import static
from cpu_bench.wire import Ran, Request
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from gpu_bench.figures import Figures, LeftOut, ServingFigures
from gpu_bench.sizes import Model, Sizes, Workload
from penstock.clients.bench.report import quantile

CONTINUOUS, STATIC = "transformers continuous", "transformers static"


def measure(model: Model, sizes: Sizes, ours_per_s: float | None) -> Iterator[Figures | LeftOut]:
    """Both ways. Static batches come first: without FlashAttention, continuous batching takes minutes."""
    workload, loaded = sizes.workload, _load(model, sizes.device)
    rng = random.Random(0)
    requests: list[Request] = [
        ([rng.randrange(model.shape.vocab_size) for _ in range(workload.prompt_tokens)], workload.output_tokens)
        for _ in range(workload.requests)
    ]
    for engine, run in ((STATIC, _static), (CONTINUOUS, _continuous)):
        try:
            if sizes.is_warmed:
                run(loaded, requests[:8], workload)
            yield _figures(model, workload, engine, run(loaded, requests, workload), ours_per_s)
        except Exception as error:
            yield LeftOut("serving", f"{model.name} {engine}", f"{type(error).__name__}: {error}"[:300])


def _load(model: Model, device: str) -> Any:
    fields: dict[str, Any] = model.config()
    config = AutoConfig.for_model(**fields)
    with torch.device(device):  # where weights are made up
        loaded = AutoModelForCausalLM.from_config(config, dtype=model.shape.dtype, attn_implementation="sdpa").eval()
    loaded.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True)
    return loaded


def _continuous(model: Any, requests: Sequence[Request], workload: Workload) -> Ran:
    """By ``generate_batch``, with its own defaults but for the number of requests at a time."""
    generation = GenerationConfig(
        do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=workload.output_tokens
    )
    settings: dict[str, Any] = {"max_requests_per_batch": workload.concurrency}
    if model.device.type == "cpu":
        settings |= {"page_size": 16, "num_blocks": 16, "max_batch_tokens": 32}
    outputs = model.generate_batch(
        inputs=[prompt for prompt, _ in requests],
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        record_timestamps=True,
    )
    answered = [output for output in outputs.values() if output.error is None]
    events = [[(at, 1) for at in output.timestamps] for output in answered]
    if [len(event) for event in events] != [workload.output_tokens] * len(requests):
        raise RuntimeError("not all requests were answered whole")
    # From the first request on: graphs are captured before that.
    return Ran(min(output.created_time for output in answered), max(times[-1][0] for times in events), events)


def _static(model: Any, requests: Sequence[Request], workload: Workload) -> Ran:
    """So many at a time as the service has; each batch waits for the one before it."""
    size = workload.concurrency
    batches = [static(model, list(requests[begin : begin + size])) for begin in range(0, len(requests), size)]
    return Ran(batches[0].began, batches[-1].ended, [events for ran in batches for events in ran.events])


def _figures(model: Model, workload: Workload, engine: str, ran: Ran, ours_per_s: float | None) -> ServingFigures:
    rate = sum(len(events) for events in ran.events) / (ran.ended - ran.began)
    gaps = sorted(later - earlier for events in ran.events for (earlier, _), (later, _) in itertools.pairwise(events))
    # All requests were sent at the beginning, so the times of their first tokens mean nothing.
    return ServingFigures(
        model=model.name,
        engine=engine,
        requests=workload.requests,
        concurrency=workload.concurrency,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        tokens_per_s=rate,
        first_token_p50_s=None,
        first_token_p99_s=None,
        between_tokens_p50_s=quantile(gaps, 0.5),
        between_tokens_p99_s=quantile(gaps, 0.99),
        ratio=ours_per_s / rate if ours_per_s else None,
    )
