"""Large answers: the event loop runs others while one is made."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from penstock.clients.events import Delta, PromptLogprobs
from penstock.clients.gateway.responses import chunking as module
from penstock.clients.gateway.responses.chunking import encoded, portions
from penstock.clients.gateway.routes.completions import CompletionWriter
from penstock.clients.output import Logprobs

MOST = module._MAX_ENTRIES


def logprobs(num_tokens, num_top):
    """All of them different."""
    numbers = [float(each) for each in range(num_tokens * num_top)]
    return Logprobs(numbers[:num_tokens], num_top, [*map(int, numbers)], numbers)


def num_entries(portion):
    of = [event.logprobs for _, event in portion if isinstance(event, Delta | PromptLogprobs)]
    return sum(len(each.chosen) + len(each.top) for each in of if each is not None)


@pytest.fixture
async def turns():
    """How often others were let run."""
    counted = [0]

    async def run():
        while True:
            counted[0] += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    yield counted
    running.cancel()


def test_many_events_come_in_portions():
    prompt = PromptLogprobs(1, logprobs(5000, 20))
    deltas = [Delta("x", [1] * 64, logprobs=logprobs(64, 20)) for _ in range(50)]
    came: list[Any] = []
    for portion in portions([(0, prompt), *((1, delta) for delta in deltas)]):
        assert num_entries(portion) <= MOST
        came += portion
    assert [event for index, event in came if index == 1] == deltas
    whole, at = Logprobs(), 1
    for _, part in came[: -len(deltas)]:
        assert part.start == at
        at += len(part.logprobs.chosen)
        whole.extend(part.logprobs)
    assert whole == prompt.logprobs


@pytest.mark.parametrize("arrivals", [[], [(0, Delta("x", [1]))] * 3])
def test_few_events_are_one_portion(arrivals):
    assert list(portions(arrivals)) == [arrivals]


@pytest.mark.parametrize("num_choices", [1, 100])
async def test_a_large_answer_is_encoded_in_parts(turns, num_choices):
    tokens = [{"token": f"{at}", "top_logprobs": [{"token": "é\n"}] * 20} for at in range(100_000 // num_choices)]
    choice = {"index": 0, "text": "", "logprobs": {"content": tokens, "refusal": None}, "empty": [{}, []]}
    answer = {"id": "x", "choices": [choice] * num_choices, "prompt_logprobs": [None, *tokens], "usage": {"total": 1}}
    before = turns[0]
    found = await encoded(answer)
    assert turns[0] - before > 10
    assert found == msgspec.json.encode(answer)


async def test_whole_answers_are_made_so(start_gateway, monkeypatch, turns):
    gateway = await start_gateway()
    sizes: list[tuple[int, int]] = []
    seen: list[int] = []
    add = CompletionWriter.add_arrivals

    async def noted(self, arrivals):
        sizes.append((num_entries(arrivals), len(arrivals)))
        seen.append(turns[0])
        return await add(self, arrivals)

    monkeypatch.setattr(CompletionWriter, "add_arrivals", noted)
    body = {"prompt": "a" * 600, "prompt_logprobs": 20, "logprobs": 20, "max_tokens": 600, "ignore_eos": True}
    answer = json.loads((await gateway.post("/v1/completions", **body)).text)
    [choice] = answer["choices"]
    assert len(choice["prompt_logprobs"]) == 600
    assert len(choice["logprobs"]["tokens"]) == 600
    assert sum(size for size, _ in sizes) == 599 * 21 + 600 * 21
    # Tokens that came together stay so: a delta is not cut, and on a busy machine one may have all. A prompt's are cut.
    assert all(size <= MOST for size, num_events in sizes if num_events > 1)
    assert len(sizes) > 599 * 21 // MOST
    assert all(later > before for before, later in pairwise(seen))  # others run in between
