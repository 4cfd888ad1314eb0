"""What the load generator asks for: lengths, arrivals, prefixes, conversations, traces, and that a seed repeats it."""

import itertools
import json
import random
import statistics

import pytest

from penstock.clients.bench.lengths import LogNormal, Normal, Uniform, parse_lengths
from penstock.clients.bench.trace import BadTrace, TraceReader
from penstock.clients.bench.workload import DEFAULT_OPTIONS, ClosedLoop, OpenLoop, RandomLoad, WarmUp, arrival_times
from penstock.clients.errors import PenstockError


def drawn(lengths, count=20_000):
    rng = random.Random(1)
    return [lengths.draw(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Uniform(512, 512)),
        ("uniform:128-1024", Uniform(128, 1024)),
        ("normal:512,128", Normal(512, 128)),
        ("lognormal:400,600.5", LogNormal(400, 600.5)),
    ],
)
def test_lengths_are_read_and_written(text, lengths):
    assert parse_lengths(text) == lengths
    assert str(lengths) == text


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "uniform:5", "uniform:9-5", "uniform:0-5", "normal:5", "normal:0,1", "zipf:3", "lognormal:9,x"],
)
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="uniform:128-1024"):
        parse_lengths(text)


def test_what_is_drawn_has_the_distribution():
    assert set(drawn(Uniform(7, 7))) == {7}
    uniform = drawn(Uniform(10, 19))
    assert (min(uniform), max(uniform)) == (10, 19)
    assert statistics.fmean(uniform) == pytest.approx(14.5, rel=0.01)
    normal = drawn(Normal(500, 100))
    assert statistics.fmean(normal) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(100, rel=0.05)
    assert min(drawn(Normal(5, 10))) == 1
    skewed = drawn(LogNormal(400, 300))
    assert statistics.fmean(skewed) == pytest.approx(400, rel=0.03)
    assert statistics.stdev(skewed) == pytest.approx(300, rel=0.1)
    assert statistics.median(skewed) < 350  # few long ones among many short ones
    assert Uniform(10, 19).most == 19
    assert Normal(5, 1).most is LogNormal(5, 1).most is None


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_arrivals_have_their_rate_and_burstiness(burstiness, variation):
    arrivals = itertools.islice(arrival_times(OpenLoop(20, burstiness), seed=1), 20_000)
    times = [time for time in arrivals if time is not None]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)
    if burstiness == 1:  # of a Poisson process: e^-1 of the gaps are longer than their mean
        assert sum(gap > 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def all_of(load):
    return [list(turns) for turns in load.conversations()]


def test_the_same_seed_makes_the_same_load_and_another_one_another():
    def load(seed, **changes):
        shape = {"arrivals": OpenLoop(5), "num_requests": 20, "prompt_tokens": Normal(50, 20), "turns": 3, **changes}
        return all_of(RandomLoad(vocab_size=1000, seed=seed, prefix_tokens=9, num_prefixes=3, **shape))

    assert load("a") == load("a")
    assert load("a") != load("b")
    # What is asked doesn't depend on when, or on how much of it there is.
    asked, faster = (
        [[r.prompt_token_ids for r in t] for t in each] for each in (load("a"), load("a", arrivals=ClosedLoop(4)))
    )
    assert asked == faster
    assert load("a", num_requests=9) == load("a")[:3]


def test_requests_are_counted_and_the_last_conversation_is_cut():
    load = RandomLoad(vocab_size=100, num_requests=7, turns=3, arrivals=OpenLoop(5))
    conversations = all_of(load)
    assert [len(turns) for turns in conversations] == [3, 3, 1]
    requests = [request for turns in conversations for request in turns]
    assert [request.number for request in requests] == list(range(7))
    assert [request.arrival_s is None for request in requests] == [False, True, True] * 2 + [False]
    assert [request.conversation for request in requests] == ["0"] * 3 + ["1"] * 3 + ["2"]
    assert {id for request in requests for id in request.prompt_token_ids} == set(range(100))


def test_a_load_without_an_end():
    load = RandomLoad(vocab_size=100, num_requests=None, prompt_tokens=Uniform(1, 1))
    numbers = [turns[0].number for turns in itertools.islice(load.conversations(), 1000)]
    assert numbers == list(range(1000))


def test_prefixes_are_shared():
    load = RandomLoad(
        vocab_size=1000, num_requests=60, prefix_tokens=32, num_prefixes=3, prompt_tokens=Uniform(8, 8), turns=2
    )
    first, second = zip(*all_of(load), strict=True)
    assert {len(request.prompt_token_ids) for request in first} == {40}
    assert {len(request.prompt_token_ids) for request in second} == {8}
    assert len({tuple(request.prompt_token_ids[:32]) for request in first}) == 3
    assert len({tuple(request.prompt_token_ids[32:]) for request in first}) == 30


def test_a_load_that_cannot_fit_is_refused_before_anything_is_sent():
    with pytest.raises(PenstockError, match=r"up to 320 tokens, and the model takes 319; lower --prompt-tokens"):
        RandomLoad(
            vocab_size=9,
            prefix_tokens=20,
            prompt_tokens=Uniform(1, 100),
            output_tokens=Uniform(50, 50),
            turns=2,
            max_model_len=319,
        )


def test_lengths_without_an_end_are_cut_to_the_model():
    load = RandomLoad(
        vocab_size=9,
        num_requests=400,
        prompt_tokens=LogNormal(200, 400),
        output_tokens=Normal(100, 80),
        turns=2,
        prefix_tokens=50,
        max_model_len=600,
    )
    lengths = [sum(len(r.prompt_token_ids) + r.max_tokens for r in turns) for turns in all_of(load)]
    assert max(lengths) <= 600
    assert len([length for length in lengths if length > 500]) > 20
    assert all(r.max_tokens >= 1 and r.prompt_token_ids for turns in all_of(load) for r in turns)


def test_the_warm_up_is_as_long_and_about_something_else():
    load = RandomLoad(vocab_size=1000, prompt_tokens=Uniform(20, 90), turns=2, arrivals=OpenLoop(1))
    warm_up = WarmUp(load, 5, 1000)
    first = [turns[0] for turns in itertools.islice(load.conversations(), 5)]
    turns = [turn for (turn,) in warm_up.conversations()]
    assert [len(t.prompt_token_ids) for t in turns] == [len(r.prompt_token_ids) for r in first]
    assert all(list(t.prompt_token_ids) != list(r.prompt_token_ids) for t, r in zip(turns, first, strict=True))
    assert {t.arrival_s for t in turns} == {None}
    assert isinstance(warm_up.arrivals, ClosedLoop)


def read(path, *lines, **reader):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return TraceReader(**{"vocab_size": 100, **reader}).read(path)


def test_a_trace(tmp_path):
    trace = read(
        tmp_path / "t.jsonl",
        {"arrival_s": 2, "prompt_tokens": 30, "max_tokens": 4, "conversation": "a"},
        {"arrival_s": 0.5, "prompt_token_ids": [5, 6], "max_tokens": 3},
        "",
        {"arrival_s": 1.5, "prompt_tokens": 7, "max_tokens": 2, "conversation": "a"},
        {"arrival_s": 1, "prompt_tokens": 7, "max_tokens": 1, "conversation": 7},
    )
    assert trace.arrivals is None
    assert trace.num_requests == 4
    told = [[(r.arrival_s, len(r.prompt_token_ids), r.max_tokens) for r in turns] for turns in trace.conversations()]
    assert told == [[(0.5, 2, 3)], [(1, 7, 1)], [(1.5, 7, 2), (2, 30, 4)]]
    assert next(iter(trace.conversations()))[0].options == DEFAULT_OPTIONS
    again = read(tmp_path / "t.jsonl", *(tmp_path / "t.jsonl").read_text().splitlines())
    assert again == trace


def test_a_trace_at_other_times(tmp_path):
    lines = [{"prompt_tokens": 3, "max_tokens": 1, "conversation": i // 2} for i in range(6)]
    closed = read(tmp_path / "t.jsonl", *lines, arrivals=ClosedLoop(2))
    assert [[r.arrival_s for r in turns] for turns in closed.conversations()] == [[None, None]] * 3
    opened = read(tmp_path / "t.jsonl", *lines, arrivals=OpenLoop(10), max_requests=5)
    times = [[r.arrival_s for r in turns] for turns in opened.conversations()]
    assert [len(turns) for turns in times] == [2, 2, 1]
    assert 0 < times[0][0] < times[1][0] < times[2][0]
    assert times[0][1] is None


GOOD = {"arrival_s": 0, "prompt_tokens": 3, "max_tokens": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ([1], "expected an object, got list"),
        (GOOD | {"max_token": 3}, "max_token: unknown field; the fields are arrival_s, prompt_token_ids"),
        (GOOD | {"max_tokens": 0}, "max_tokens: expected a whole number from 1 to 16,777,216, got 0"),
        (GOOD | {"max_tokens": True}, "max_tokens: expected a whole number from 1 to 16,777,216, got True"),
        ({"arrival_s": 0, "prompt_tokens": 3}, "max_tokens: expected a whole number from 1 to 16,777,216, got nothing"),
        (GOOD | {"arrival_s": 10**400}, "arrival_s: expected seconds, 0 to 1,000,000,000"),
        (GOOD | {"prompt_tokens": 10**400}, "prompt_tokens: expected a whole number from 1 to 16,777,216, got 1000"),
        (GOOD | {"max_tokens": 10**9}, "max_tokens: expected a whole number from 1 to 16,777,216, got 1000000000"),
        (GOOD | {"arrival_s": -1}, "arrival_s: expected seconds, 0 to 1,000,000,000"),
        ({"prompt_tokens": 3, "max_tokens": 1}, r"arrival_s: expected .* --concurrency\), got nothing"),
        (GOOD | {"prompt_tokens": "3"}, "prompt_tokens: expected a whole number from 1 to 16,777,216, got '3'"),
        (GOOD | {"prompt_token_ids": [1]}, "prompt_tokens: expected either this or prompt_token_ids, got 3"),
        ({"arrival_s": 0, "max_tokens": 1}, "prompt_tokens: expected either this or prompt_token_ids, got nothing"),
        ({"arrival_s": 0, "max_tokens": 1, "prompt_token_ids": []}, "prompt_token_ids: expected a list of token ids"),
        (
            {"arrival_s": 0, "max_tokens": 1, "prompt_token_ids": [1, 100]},
            r"prompt_token_ids\[1\]: expected a token id below 100, got 100",
        ),
        (GOOD | {"conversation": 1.5}, "conversation: expected a string or a number, got 1.5"),
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_field(tmp_path, line, message):
    with pytest.raises(BadTrace, match=rf"^t\.jsonl, line 2: {message}"):
        read(tmp_path / "t.jsonl", GOOD, line)


def test_a_trace_that_is_not_there_or_empty(tmp_path):
    with pytest.raises(BadTrace, match=r"--trace: cannot read .*nothing: No such file"):
        TraceReader(vocab_size=9).read(tmp_path / "nothing")
    with pytest.raises(BadTrace, match="has no requests"):
        read(tmp_path / "t.jsonl", "")
