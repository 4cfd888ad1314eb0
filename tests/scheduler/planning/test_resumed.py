"""Requests that resume the output of another engine: their output counts like a prompt until they run."""

from dataclasses import replace

import pytest
from known_requests import BLOCK_SIZE, make_config, make_prompt

from penstock.kv.block_hash import hash_more_blocks
from penstock.scheduler.planning.output_buffer import resume_output
from penstock.scheduler.request import EngineFinishReason, ResumedSequence


@pytest.fixture
def new_resumed(new_request):
    """Makes requests with a prompt of nine tokens, of whose choices another engine has chosen some tokens."""

    def new_resumed(name, *numbers, **fields):
        request = new_request(name, make_prompt(9), n=len(numbers), max_tokens=12, **fields)
        request.resumed = []
        for index, number in enumerate(numbers):
            token_ids = make_prompt(number, first=index)
            history = request.prompt_token_ids + token_ids
            hashes = hash_more_blocks(history, request.block_hashes, BLOCK_SIZE, request.hash_salt)
            output, _ = resume_output(request, index, token_ids)
            request.resumed.append(ResumedSequence(token_ids, hashes, output))
        return request

    return new_resumed


@pytest.fixture
def busy(world_type, new_request):
    """A world with one row, which is in use."""
    world = world_type(60, make_config(max_num_seqs=1))
    world.add(new_request("runs", make_prompt(20, first=3), max_tokens=14))
    assert world.step() == ["runs"]
    return world


@pytest.mark.parametrize("numbers", [(11,), (11, 3), (0, 11), (12, 5), (12, 12)])
def test_the_queue_counts_their_output(busy, new_request, new_resumed, numbers):
    """Until the first choice begins or ends, or another request replaces them."""
    waiting = busy.scheduler.waiting
    busy.add(new_resumed("resumed", *numbers))
    busy.check()
    assert waiting.queued == ((1, 9 + sum(numbers)) if numbers[0] < 12 else (0, 0))
    assert ("resumed" in busy.alive()) == (min(numbers) < 12)
    busy.add(new_request("new", make_prompt(8, first=2), max_tokens=2, supersedes="resumed"))
    busy.check()
    assert waiting.queued == (1, 8)


def test_their_output_is_work(busy, new_resumed):
    """Choices share the prompt's two full blocks. The hashes are known from the beginning."""
    busy.add(new_resumed("resumed", 11, 3))
    live = busy.scheduler.requests["resumed"]
    assert live.work.tokens == 20 + 12 - 2 * BLOCK_SIZE
    assert [len(sequence.hashes) for sequence in live.sequences] == [20 // BLOCK_SIZE, 12 // BLOCK_SIZE]
    assert busy.scheduler.abort("resumed", EngineFinishReason.CANCELLED)
    busy.check()


def test_room_of_a_superseded_one(busy, new_request, new_resumed):
    """The request that replaces one gets no more room than that one had."""
    waiting = busy.scheduler.waiting
    busy.add(new_request("first", make_prompt(10), max_tokens=2))
    busy.add(new_resumed("resumed", 11))
    busy.config = replace(busy.config, max_queued_tokens=waiting.queued.tokens)
    busy.scheduler.reconfigure(busy.config)
    assert busy.add(new_request("longer", make_prompt(21), max_tokens=2, supersedes="resumed")) is None
    assert busy.add(new_request("same", make_prompt(20), max_tokens=2, supersedes="resumed")) is not None
    busy.check()
