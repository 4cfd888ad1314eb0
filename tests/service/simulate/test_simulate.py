"""``penstock simulate``: its figures, its sweep, its files, and what it refuses."""

import json

import pytest
from simulations.step_logs import random_steps, write_log

from penstock.clients.cli.main import main as penstock
from penstock.clients.errors import PenstockError
from penstock.scheduler.policy import Policy
from penstock.service.simulate.command import NOT_MET, main
from penstock.service.simulate.flags import parse_costs, parse_sweep

COSTS = ["--step-cost", "constant=20ms,prefill_tokens=50us,decodes=100us", "--max-model-len", "4096"]
COSTS += ["--kv-cache-tokens", "20000"]
PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path):
    """Writes a trace, by default one of 40 requests in 4 s; returns its path."""

    def write(*lines, name="trace.jsonl"):
        path = tmp_path / name
        usual = [{"arrival_s": n / 10, "prompt_tokens": 50 + 7 * n, "max_tokens": 4 + n} for n in range(40)]
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines or usual))
        return str(path)

    return write


@pytest.fixture
def log(tmp_path):
    return str(write_log(tmp_path / "steps.jsonl", random_steps(300, noise=0.05)))


def simulated(capsys, *arguments, status=0):
    """What a run writes as JSON."""
    assert main([*arguments, "--json", "-"]) == status
    return json.loads(capsys.readouterr().out)


def test_figures_of_a_load_that_can_be_computed_by_hand(trace, capsys):
    path = trace({"arrival_s": 0, "prompt_tokens": 100, "max_tokens": 11})
    content = simulated(capsys, path, *COSTS, "--network", "0", "--slo", "ttft=30ms,itl=20ms")
    (run,) = content["runs"]
    times = run["summary"]["times_s"]
    assert times["ttft"]["p50"] == pytest.approx(0.025)
    assert times["itl"]["p99"] == pytest.approx(0.0201)
    assert times["e2e"]["max"] == pytest.approx(0.226)
    assert run["summary"]["output_tokens_per_s"] == pytest.approx(11 / 0.226)
    assert run["summary"]["requests"]["ok"] == 1
    assert run["summary"]["goodput"]["share"] == 0.0  # itl is 20.1 ms
    assert run["summary"]["busy_share"] == pytest.approx(1.0, abs=0.02)
    assert run["settings"]["kv_cache_tokens"] == 20_000
    (request,) = content["requests"]
    assert len(request["message_s"]) == 11


def test_a_log_needs_no_other_flag(trace, log, capsys):
    assert main([trace(), "--step-log", log]) == 0
    printed = capsys.readouterr().out
    assert "steps of at most 64 sequences and 256 tokens, a KV cache of 64,000 tokens, fcfs" in printed
    assert "costs of steps from steps.jsonl: 300 steps, with a median error of " in printed
    assert "requests      40 of 40 answered" in printed
    assert "KV cache " in printed
    assert "this client" not in printed
    assert "WARNING" not in printed


def test_the_same_seed_gives_the_same_figures(trace, log, capsys):
    def figures(seed):
        content = simulated(capsys, trace(), "--step-log", log, "--seed", seed)
        return content["runs"][0]["summary"]["times_s"]

    assert figures("1") == figures("1") != figures("2")


def test_flags_override_the_log(trace, log, capsys):
    flags = "--replicas 2 --pipeline-parallel-size 2 --max-num-seqs 8 --max-num-batched-tokens 100 --target-itl 50"
    flags += " --kv-cache-tokens 1600 --scheduling-policy deadline --max-queued-requests 3 --max-model-len 500"
    flags += (
        " --no-enable-prefix-caching --routing round-robin --timeout-ms 60000 --num-requests 9 --max-queued-tokens 999"
    )
    content = simulated(capsys, trace(), "--step-log", log, *flags.split())
    settings = content["runs"][0]["settings"]
    assert settings["replicas"] == settings["pipeline_parallel_size"] == 2
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"], settings["target_itl_s"]) == (8, 100, 0.05)
    assert (settings["kv_cache_tokens"], settings["policy"], settings["max_queued_requests"]) == (1600, "deadline", 3)
    assert (settings["max_model_len"], settings["enable_prefix_caching"], settings["max_queued_tokens"]) == (
        500, False, 999,
    )  # fmt: skip
    assert settings["routing"] == "round-robin"
    assert content["runs"][0]["summary"]["requests"]["sent"] == 9


def test_shared_prefixes_and_turns_are_found_in_the_cache(trace, capsys):
    prefix = list(range(160))
    shared = [{"arrival_s": float(n), "prompt_token_ids": [*prefix, n], "max_tokens": 4} for n in range(4)]
    turns = [{"arrival_s": 9.0, "prompt_tokens": 64, "max_tokens": 32, "conversation": "a"} for _ in range(3)]
    path = trace(*shared, *turns)
    summary = simulated(capsys, path, *COSTS, "--replicas", "2")["runs"][0]["summary"]
    # The replica of the first one has it for the others: a later turn goes where the earlier ones went.
    assert summary["cached_tokens"] == 3 * 160 + 80 + 176
    assert summary["prompt_tokens"] == 4 * 161 + 64 + 160 + 256
    assert simulated(capsys, path, *COSTS, "--no-enable-prefix-caching")["runs"][0]["summary"]["cached_share"] == 0


def test_refusals_deadlines_and_preemptions_are_counted(trace, capsys):
    many = [{"arrival_s": 0.0, "prompt_tokens": 100, "max_tokens": 100} for _ in range(40)]
    flags = ["--max-queued-requests", "16", "--max-num-seqs", "20", "--timeout-ms", "3000", "--kv-cache-tokens", "1600"]
    summary = simulated(capsys, trace(*many), *COSTS[:4], *flags)["runs"][0]["summary"]
    failed = summary["requests"]["failed"]
    assert failed["RESOURCE_EXHAUSTED QUEUE_FULL"]["count"] > 5
    assert sum(kind["count"] for kind in failed.values()) == 40 - summary["requests"]["ok"] > 10
    assert summary["preemptions"] > 0
    assert summary["kv_usage"]["max"] > 0.9


def test_a_conversation_whose_turn_fails_ends(trace, capsys):
    turns = [{"arrival_s": 0.0, "prompt_tokens": 10, "max_tokens": 500, "conversation": "a"} for _ in range(3)]
    content = simulated(capsys, trace(*turns), *COSTS, "--timeout-ms", "1000", status=1)
    failed = content["runs"][0]["summary"]["requests"]["failed"]
    assert {name: each["count"] for name, each in failed.items()} == {"DEADLINE_EXCEEDED DEADLINE": 1, "NOT_SENT": 2}


def test_loads_of_other_rates(trace, capsys):
    def seconds(*flags):
        return simulated(capsys, trace(), *COSTS, *flags)["runs"][0]["summary"]["seconds"]

    assert 4 < seconds() < 6
    assert 40 / 2 - 8 < seconds("--rate", "2") < 40 / 2 + 8
    assert seconds("--concurrency", "40") < seconds("--concurrency", "1")


def test_a_sweep_prints_a_table_and_names_the_cheapest(trace, capsys, tmp_path):
    sweep = ["--sweep", "rate=1,4", "--sweep", "replicas=1,2,4", "--plot", str(tmp_path / "sweep.png")]
    slo = ["--slo", "ttft=300ms", "--slo-share", "0.9", "--max-num-seqs", "4", "--json", str(tmp_path / "out.json")]
    assert main([trace(), *COSTS, *slo, *sweep]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[:3] for line in printed.splitlines() if line.startswith("   ")]
    assert rows == [[rate, number, number] for rate in "14" for number in "124"]
    assert "cheapest: at 1 times the rate, replicas 2 (2 workers): " in printed
    assert "cheapest: at 4 times the rate, replicas 4 (4 workers): " in printed
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)
    content = json.loads((tmp_path / "out.json").read_text())
    assert [(each["rate"], each["settings"]["replicas"]) for each in content["cheapest"]] == [(1, 2), (4, 4)]
    assert len(content["runs"]) == 6


def test_the_slo_that_fails_everywhere_is_named(trace, capsys):
    sweep = ["--sweep", "max-num-seqs=2,8", "--slo", "ttft=10s,itl=5ms", "--json", "-"]
    assert main([trace(), *COSTS, *sweep]) == NOT_MET
    output = capsys.readouterr()
    assert "none: no configuration meets the SLOs in 99.0% of the requests; best is max-num-seqs " in output.err
    assert "where itl 5 ms is met by 0.0%" in output.err
    assert "ttft 10" not in output.err
    (choice,) = json.loads(output.out)["cheapest"]
    assert (choice["is_met"], choice["failing"]) == (False, {"itl": 0.0})


def test_a_plot_of_one_run(trace, tmp_path):
    path = tmp_path / "run.png"
    assert main([trace(), *COSTS, "--plot", str(path), "--slo", "ttft=1s"]) == 0
    assert path.read_bytes().startswith(PNG)


def test_steps_beyond_those_of_the_log_are_reported(trace, log, capsys):
    many = [{"arrival_s": 0.0, "prompt_tokens": 20, "max_tokens": 20} for _ in range(60)]
    assert main([trace(*many), "--step-log", log]) == 0
    assert "WARNING: steps have up to 60 decoding rows, and those of the log at most 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["{"], "trace.jsonl, line 1: not JSON"),
        (["", ""], "TRACE: .*trace.jsonl has no requests; write one on each line"),
        ([{"prompt_tokens": 5, "max_tokens": 1}], "line 1: arrival_s: expected seconds, .* got nothing"),
        (['{"arrival_s": NaN, "prompt_tokens": 5, "max_tokens": 1}'], "line 1: arrival_s: expected seconds"),
        ([{"arrival_s": -1, "prompt_tokens": 5, "max_tokens": 1}], "line 1: arrival_s: expected seconds"),
        ([{"arrival_s": 0, "prompt_tokens": 5, "max_tokens": -1}], "line 1: max_tokens: expected a whole number"),
        (
            [
                {"arrival_s": 0, "prompt_tokens": 5, "max_tokens": 1},
                {"arrival_s": 0, "prompt_tokens": 4090, "max_tokens": 7},
            ],
            "trace.jsonl, line 2: prompt and output have 4,097 tokens, and the model takes 4,096; shorten them, or set",
        ),
        (
            [{"arrival_s": 0, "prompt_tokens": 2000, "max_tokens": 60, "conversation": 1}] * 2,
            "line 2: the conversation's turns have 4,120 tokens, and the model takes 4,096",
        ),
    ],
)  # fmt: skip
def test_a_bad_line_of_a_trace_is_named(trace, lines, problem):
    with pytest.raises(PenstockError, match=problem):
        main([trace(*lines), *COSTS])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/none.jsonl", *COSTS], "TRACE: cannot read /none.jsonl: No such file or directory; check the path"),
        (["TRACE", "--step-log", "/none"], "--step-log: cannot read /none: No such file or directory"),
        (["TRACE", "--step-log", "TRACE"], "--step-log: .*trace.jsonl, line 1: not a step log; give a file that"),
        (["TRACE", *COSTS, "--json", "/none/x"], "--json: cannot write /none/x; give a file in a directory that"),
        (["TRACE", *COSTS, "--plot", "/none/x"], "--plot: cannot write /none/x"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(trace, arguments, problem):
    path = trace()
    with pytest.raises(PenstockError, match=problem):
        main([path if argument == "TRACE" else argument for argument in arguments])


def test_a_log_that_is_too_short_is_refused_with_a_remedy(trace, tmp_path):
    path = write_log(tmp_path / "steps", random_steps(10))
    with pytest.raises(PenstockError, match=r"--step-log: .*steps has 10 steps, and a fit needs 32; log a longer and"):
        main([trace(), "--step-log", str(path)])
    other = tmp_path / "other"
    other.write_text(path.read_text().replace('"step_log":1', '"step_log":7'))
    with pytest.raises(PenstockError, match=r"--step-log: .*other, line 1: its format is 7, and this penstock reads 1"):
        main([trace(), "--step-log", str(other)])


def test_a_plot_without_its_library_names_the_extra(trace, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PenstockError, match=r"pip install 'penstock-llm\[bench\]'"):
        main([trace(), *COSTS, "--plot", str(tmp_path / "x.png")])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "step costs come from either --step-log FILE or --step-cost COSTS; give one of them"),
        ("--step-log a --step-cost constant=1s", "give one of them"),
        ("--step-cost constant=1s", "--step-cost needs --kv-cache-tokens as well"),
        ("--step-cost constant=1s --kv-cache-tokens 99", "--step-cost needs --max-model-len as well"),
        ("--step-cost constant=nans", "--step-cost: expected times of constant, prefill_tokens, "),
        ("--step-cost constant=-1ms", "--step-cost: expected times of constant"),
        ("--step-cost constant=1", "got 'constant=1'"),
        ("--step-cost constant=0ms", "--step-cost: a step must take some time"),
        ("--step-log a --rate 1 --concurrency 2", "--rate and --concurrency cannot be combined"),
        ("--step-log a --rate nan", "--rate: expected a number above 0, got nan"),
        ("--step-log a --replicas 0", "--replicas: must be 1 to 256; it is 0"),
        ("--step-log a --scheduling-policy lifo", "--scheduling-policy: must be fcfs, priority, deadline, fair; it is"),
        ("--step-log a --target-itl nan", "--target-itl: must be 0 to 60000; it is nan"),
        ("--step-log a --stage-hop -1", "--stage-hop: expected"),
        ("--step-log a --slo ttft=-1s", "--slo: expected bounds of ttft, itl, tpot, e2e"),
        ("--step-log a --slo-share 1.5", "--slo-share: expected a share above 0 and at most 1, got 1.5"),
        ("--step-log a --sweep speed=1,2", "--sweep: expected NAME=VALUE,VALUE with one of rate, replicas, "),
        ("--step-log a --sweep replicas=1,x", "--sweep: replicas: must be 1 to 256; it is x"),
        ("--step-log a --sweep rate=0,1", "--sweep: rate: must be above 0 and at most 1e+06; it is 0"),
        ("--step-log a --sweep replicas=1 --sweep replicas=2", "--sweep replicas: is given twice"),
        ("--step-log a --sweep rate=1,2 --concurrency 4", "--sweep rate: --concurrency has no rate"),
        (f"--step-log a --sweep replicas={','.join(['1'] * 50)} --sweep rate={','.join(['1'] * 50)}", "2,500 config"),
        ("--step-log a --replica 2", "did you mean --replicas?"),
    ],
)
def test_invalid_flags_are_refused_with_a_line(flags, problem, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["trace.jsonl", *flags.split()])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_costs_and_sweeps_on_the_command_line():
    costs = parse_costs("constant=20ms, decodes=100us,decode_kv=1.5e-1us,service=2ms,service_rows=5us")
    assert (costs.step.constant, costs.step.decodes) == pytest.approx((0.02, 1e-4))
    assert costs.step.decode_kv == pytest.approx(1.5e-7)
    assert costs.service.handling_s(10) == pytest.approx(0.00205)
    assert parse_sweep("--max-num-seqs=8,16") == ("max-num-seqs", [8, 16])
    assert parse_sweep("scheduling-policy=fcfs,fair") == ("scheduling-policy", [Policy.FCFS, Policy.FAIR])


def test_the_help_has_examples_and_the_command_is_listed(capsys):
    assert penstock(["simulate", "--help"]) == 0
    assert "penstock simulate trace.jsonl --step-log steps.jsonl --rate 20" in capsys.readouterr().out
    assert penstock(["--help"]) == 0
    assert "  simulate " in capsys.readouterr().out
