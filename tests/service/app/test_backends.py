"""``penstock serve`` over each backend, by every call that generates and more: answers are those of the reference.

Without a GPU the backend for them runs in Triton's interpreter, and the model is as small as can be. With one it runs
there, and has the demo model and the shape of 8 billion parameters as well.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from safetensors.torch import save_file
from waiting import until

pytest.importorskip("triton")  # it has wheels only for Linux

from gpu_bench.sizes import FULL, TINY

import penstock.v1 as pb
from penstock.clients import AsyncClient
from penstock.clients.events import Completion, Delta, FinishReason
from penstock.clients.requests import build_start
from penstock.models.architecture.registry import spec_from_config
from penstock.service.app.embedded import local_service
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.timeout(300)

ON_GPU = pytest.mark.gpu
[SMALL], LLAMA_8B = TINY.models, FULL.models[1]
SMALL = replace(SMALL, shape=replace(SMALL.shape, max_positions=2048))
PROMPT = "It is cold."
PLAIN: Any = {"allowed_token_ids": list(range(40, 120)), "ignore_eos": True}
"""Each of these tokens is a character."""
GREEDY: Any = {"temperature": 0.0, **PLAIN}


@dataclass(frozen=True)
class Served:
    """A service in a process of its own."""

    target: str
    process: psutil.Process
    num_tokens: int
    """Of an output that takes long enough to be disturbed, and no minute."""

    def worker(self) -> psutil.Process | None:
        for child in self.process.children():
            with suppress(psutil.Error):
                if "penstock.models.worker.main" in " ".join(child.cmdline()):
                    return child
        return None


@contextmanager
def serving(model: Path | str, backend: str, device: str) -> Iterator[Served]:
    """In fp32, where no two tokens are equally likely."""
    is_slow = (backend, device) == ("cuda", "cpu")
    num_tokens = 5 if is_slow else 60 if LLAMA_8B.name in str(model) else 1500
    flags: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 4, "dtype": "float32", "threads": 1}
    flags["kv_cache_memory_bytes"] = "2G" if LLAMA_8B.name in str(model) else "64M"
    if model != "demo" and not (Path(model) / "model.safetensors").exists():
        flags["load_format"] = "dummy"
    others = set(psutil.Process().children())
    with local_service(str(model), backend=backend, device=device, **flags) as target:
        [process] = set(psutil.Process().children()) - others
        yield Served(target, process, num_tokens)


@pytest.fixture(
    scope="module", params=["tiny", pytest.param("demo", marks=ON_GPU), pytest.param(LLAMA_8B.name, marks=ON_GPU)]
)
def model(request, byte_tokenizer_path, tmp_path_factory):
    """One of a layer, whose weights are random; the demo model; and one whose weights are made up where it runs."""
    if request.param == "demo":
        return "demo"
    shape = SMALL if request.param == "tiny" else LLAMA_8B
    folder = tmp_path_factory.mktemp(request.param)
    shape.write_config(folder)
    for file in byte_tokenizer_path.iterdir():
        (folder / file.name).symlink_to(file)
    if shape is not LLAMA_8B:
        generator = torch.Generator().manual_seed(3)
        tensors = {
            name: torch.normal(float(name.endswith("norm.weight")), 0.3, size, generator=generator)
            for name, size in spec_from_config(shape.config()).tensors()
        }
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(model):
    """Made-up weights are the same on the same device alone."""
    with serving(model, "reference", "cuda" if LLAMA_8B.name in str(model) else "cpu") as served:
        yield served


# Serving takes minutes in the interpreter, so without a GPU only the long tests use it.
@pytest.fixture(
    scope="module",
    params=["cpu", "cuda" if torch.cuda.is_available() else pytest.param("cuda", marks=pytest.mark.soak)],
)
def served(request, model):
    device = "cpu"
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
        if "tiny" not in str(model):
            pytest.skip("larger models are here for GPUs")
    elif torch.cuda.is_available():
        device = "cuda"
    with serving(model, request.param, device) as served:
        yield served


@pytest.fixture
async def both(served, expected):
    """Clients of the service and of the reference."""
    async with AsyncClient(served.target) as ours, AsyncClient(expected.target) as theirs:
        yield ours, theirs


def outputs(completion: Completion) -> list[Any]:
    """What does not depend on how numbers are rounded."""
    return [(choice.text, choice.token_ids, choice.end) for choice in completion.choices]


async def same(both, prompt: Any, **options: Any) -> Completion:
    """What the service answers; and the reference too."""
    answers: list[Completion] = await asyncio.gather(*(client.complete(prompt, **options) for client in both))
    ours, theirs = answers
    assert outputs(ours) == outputs(theirs)
    return ours


async def test_every_call_gives_the_same(served, both):
    """On a stream of requests, then on one of its own, then without a stream."""
    expected = await same(both, PROMPT, max_tokens=3, **GREEDY)
    start = build_start(PROMPT, {"max_tokens": 3, **GREEDY})
    async with grpc.aio.insecure_channel(served.target) as channel:
        stub = GenerationServiceStub(channel)
        messages = [message async for message in stub.GenerateOne(pb.GenerateOneRequest(start=start))]
        whole = await stub.Complete(pb.CompleteRequest(start=start))
    deltas = [delta for message in messages for delta in message.deltas]
    assert len(deltas) > 1, "it comes as it is computed"
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [(choice.text, list(choice.token_ids)) for choice in whole.choices] == [(expected.text, expected.token_ids)]
    assert messages[-1].finished.usage == whole.finished.usage


async def test_choices_that_are_sampled(both):
    """With everything that changes what is drawn, beside a request that has none of it."""
    sampling: Any = {"temperature": 1.1, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "seed": 7, "max_tokens": 3}
    penalties: Any = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    words: Any = {"logit_bias": {70: 2.0}, "bad_words": ["e"], **PLAIN}
    drawn, greedy = await asyncio.gather(
        same(both, PROMPT, n=2, **sampling, **penalties, **words), same(both, PROMPT, max_tokens=3, **GREEDY)
    )
    first, second = drawn.choices
    assert len({tuple(choice.token_ids) for choice in (first, second, *greedy.choices)}) == 3


async def test_logprobs(both):
    options: Any = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 2, **GREEDY}
    ours, theirs = await asyncio.gather(*(client.complete(PROMPT, **options) for client in both))
    assert outputs(ours) == outputs(theirs)
    for found, expected in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
        assert found.top_token_ids == expected.top_token_ids
        assert [*found.chosen, *found.top] == pytest.approx([*expected.chosen, *expected.top], abs=1e-3)
    assert len(ours.prompt_logprobs.chosen) == ours.usage.prompt_tokens - 1


async def test_a_stop_string_ends_a_chat(both):
    chat: Any = [{"role": "user", "content": "Hi"}]
    options: Any = {"max_tokens": 8, "seed": 3, **PLAIN}
    text = (await both[1].complete(chat, **options)).text
    stopped = await same(both, chat, stop=text[2], **options)
    assert stopped.text == text[: text.index(text[2])]
    assert (stopped.finish_reason, stopped.choices[0].end.stop) == (FinishReason.STOP, text[2])


async def test_a_prefix_comes_from_the_cache(both):
    prompt = list(range(40, 60))
    first, second = [await same(both, prompt, max_tokens=2, **GREEDY) for _ in range(2)]
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 16)
    assert outputs(first) == outputs(second)


async def test_a_cancelled_request_does_not_affect_others(served, both):
    """Repeated until a cancel comes before the end: a busy machine may run this client later than the whole request."""
    reason = None
    while reason is not FinishReason.CANCELLED:
        async with both[0].generate(PROMPT, max_tokens=served.num_tokens, **GREEDY) as request:
            beside = asyncio.create_task(same(both, PROMPT * 2, max_tokens=3, **GREEDY))
            while not any(isinstance(event, Delta) for event in await request.take()):
                pass
            request.cancel()
            reason = (await request.completion()).finished.reason
            await beside


async def test_embeddings(both):
    ours, theirs = await asyncio.gather(*(client.embed([PROMPT, [5, 6, 7]]) for client in both))
    for vector, expected in zip(ours.vectors, theirs.vectors, strict=True):
        assert vector == pytest.approx(expected, abs=1e-3)


async def killed_amid(served, requests):
    """All events of the requests, whose worker is killed once each of them has tokens."""
    killed = served.worker()
    events: list[list[Any]] = [[] for _ in requests]
    while not all(any(isinstance(event, Delta) for event in had) for had in events):
        for request, had in zip(requests, events, strict=True):
            had += await request.take()
    killed.kill()
    for request, had in zip(requests, events, strict=True):
        while more := await request.take():
            had += more
    await until(lambda: served.worker() not in (None, killed))
    return events


async def test_streams_go_on_when_the_worker_is_killed(served, both):
    """Greedy and sampled ones. Repeated until the worker is killed before either ends, as above."""
    every: Any = [(PROMPT, GREEDY), (PROMPT * 2, {"seed": 11, **PLAIN})]
    every = [(prompt, {"max_tokens": served.num_tokens, **options}) for prompt, options in every]
    expected = [(await both[1].complete(prompt, **options)).token_ids for prompt, options in every]
    restarts = [0]
    while 0 in restarts:
        events = await killed_amid(served, [both[0].generate(prompt, **options) for prompt, options in every])
        restarts = [had.pop().timings.restarts for had in events]
        token_ids = [[id for event in had if isinstance(event, Delta) for id in event.token_ids] for had in events]
        assert token_ids == expected
    assert restarts == [1, 1]
