"""The ids that engines are compared on never change, and the models' tokenizer is the same everywhere."""

import hashlib
import itertools
import json

import pytest
from cpu_bench import workloads
from cpu_bench.make_models import make_tokenizer
from cpu_bench.wire import Request
from cpu_bench.workloads import OpenLoop

HASHES = {
    ("W1", 0): "e3ba3b90c2f555ff",
    ("W2", 0): "3189005d6721f37d",
    ("W3", 1): "a0980cb1415aa902",
    ("W4", 2): "62ebafb7948bff0c",
}


@pytest.mark.parametrize(("name", "repetition"), HASHES)
def test_the_ids_are_those_of_every_run_before(name: str, repetition: int) -> None:
    text = json.dumps(workloads.build(name, repetition))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == HASHES[name, repetition]


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt", "num_output"),
    [("W1", 16, 2048, 1024), ("W2", 16, 8332, 1087), ("W3", 16, 12800, 512), ("W4", 1, 512, 64)],
)
def test_the_shapes(name: str, num_requests: int, num_prompt: int, num_output: int) -> None:
    requests = workloads.build(name, 5)
    assert len(requests) == num_requests
    assert sum(len(prompt) for prompt, _ in requests) == num_prompt
    assert sum(output for _, output in requests) == num_output
    assert all(300 <= token < 4000 for prompt, _ in requests for token in prompt)


def test_repetitions_share_no_prefix_but_one_has_a_common_one() -> None:
    first, second = workloads.build("W3", 0), workloads.build("W3", 1)
    assert len({tuple(prompt[:768]) for prompt, _ in first}) == 1
    assert len({tuple(prompt) for prompt, _ in first}) == 16
    assert first[0][0][:16] != second[0][0][:16]


def test_arrivals_are_random_and_the_same_for_every_engine() -> None:
    open_loop = OpenLoop(2.0)
    work = workloads.work("W5", 3, open_loop)
    assert work == workloads.work("W5", 3, open_loop)
    assert work.arrivals_s != workloads.work("W5", 4, open_loop).arrivals_s
    assert work.arrivals_s == sorted(work.arrivals_s)
    assert len(work.arrivals_s) == len(work.requests) == pytest.approx(2.0 * 240, rel=0.15)
    assert 0 < work.arrivals_s[0] < work.arrivals_s[-1] < 240
    gaps = [later - sooner for sooner, later in itertools.pairwise(work.arrivals_s)]
    # The share of gaps above the mean is 1/e.
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.37, abs=0.08)


def test_arrivals_have_the_lengths_of_w2() -> None:
    def lengths(requests: list[Request]) -> list[tuple[int, int]]:
        return sorted((len(prompt), num_output) for prompt, num_output in requests)

    work = workloads.work("W5", 0, OpenLoop(1.0))
    assert lengths(work.requests[:16]) == lengths(work.requests[16:32]) == lengths(workloads.build("W2", 0))


def test_conversations_have_turns() -> None:
    work = workloads.work("W6", 0)
    assert (len(work.requests), work.turns, work.pause_s, work.arrivals_s) == (48, 6, 2.0, [])
    assert {(len(prompt), num_output) for prompt, num_output in work.requests} == {(256, 64)}
    assert len({tuple(prompt) for prompt, _ in work.requests}) == 48


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ValueError, match="W9; there are W1, W2, W3, W4"):
        workloads.build("W9", 0)


def test_the_tokenizer_is_counted_up() -> None:
    tokenizer = make_tokenizer(4000)
    assert len(tokenizer) == 4000
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.decode(tokenizer.encode("Water runs: é 1.")) == "Water runs: é 1."
    assert tokenizer.convert_ids_to_tokens([259, 260, 2963]) == ["aa", "ab", "aaa"]
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    assert hashlib.sha256(vocabulary.encode()).hexdigest()[:16] == "fb51258debd7cc5a"
