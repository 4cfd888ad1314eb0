"""``penstock bench``: arguments, what it prints and writes, its exit status, Ctrl-C, and a terminal's progress bar."""

import asyncio
import json
import re
import signal

import pytest
from waiting import wait_until

from penstock.clients.bench import grpc_target as bench_grpc
from penstock.clients.bench.flags import parse_arguments
from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.runner import run
from penstock.clients.bench.trace import Trace
from penstock.clients.bench.workload import DEFAULT_OPTIONS, BenchRequest, ClosedLoop, RandomLoad
from penstock.clients.cli import main as cli
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.errors import InvalidOption

SMALL = ("--vocab-size", 90, "--num-requests", 12, "--prompt-tokens", "uniform:5-30", "--warmup", 2)


def test_the_table_and_the_files(tool, threaded_service, tmp_path):
    files = ("--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    arguments = (*SMALL, "--seed", "s", "--slo", "ttft=30s,e2e=60s", "--set", "top_k=5", *files)
    done = tool.run("bench", threaded_service.target, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 of 12 answered" in done.stdout
    assert "100.0% of all requests (within ttft 30.00 s, e2e 60.00 s)" in done.stdout
    assert re.search(r"time to first token +[\d.]+ m?s", done.stdout)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["model"] == "fake"
    assert told["options"] == {**DEFAULT_OPTIONS, "top_k": 5}
    assert told["summary"]["requests"]["ok"] == len(told["requests"]) == 12
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    starts = threaded_service.starts
    assert len(starts) == 14  # two of them to warm up
    assert all((start.sampling.top_k, start.sampling.ignore_eos) == (5, True) for start in starts)
    ids = {request["number"]: request["token_ids"] for request in told["requests"]}
    again = tool.run("bench", threaded_service.target, *SMALL, "--seed", "s", "--json", "-", "--concurrency", 3)
    assert "12 of 12 answered" in again.stderr
    assert {request["number"]: request["token_ids"] for request in json.loads(again.stdout)["requests"]} == ids
    other = tool.run("bench", threaded_service.target, *SMALL, "--seed", "t", "--json", "-")
    assert {request["number"]: request["token_ids"] for request in json.loads(other.stdout)["requests"]} != ids


def test_a_trace_and_its_mistakes(tool, threaded_service, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": i / 100, "prompt_token_ids": [60 + i] * 4, "max_tokens": 3} for i in range(5)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--vocab-size", 90, "--trace", trace, "--warmup", 0)
    done = tool.run("bench", threaded_service.target, *arguments, "--json", "-")
    assert [r["token_ids"] for r in json.loads(done.stdout)["requests"]] == [[60 + i] * 3 for i in range(5)]
    trace.write_text('{"arrival_s": 1, "max_tokens": 3}\n')
    done = tool.run("bench", threaded_service.target, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("penstock bench: trace.jsonl, line 1: prompt_tokens: expected either this or")


def test_ctrl_c_prints_the_partial_results(tool, threaded_service):
    threaded_service.delay = 0.002
    process = tool.start("bench", threaded_service.target, "--vocab-size", 90, "--duration", 100, "--prompt-tokens", 20)
    wait_until(lambda: len(threaded_service.starts) >= 40)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"")
    assert b"INTERRUPTED" in out
    assert b"(stopped early)" in out
    assert re.search(rb"requests +[1-9]\d* of \d+ answered", out)


def test_nobody_there(tool):
    done = tool.run("bench", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "penstock bench: no service answers at 127.0.0.1:1: Connection refused\n"
    done = tool.run("bench", "127.0.0.1:1", "--api", "openai", "--vocab-size", 9)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("penstock bench: cannot reach the server http://127.0.0.1:1: ")


def test_the_wrong_listener(tool, admin):
    done = tool.run("bench", admin.target)
    assert (done.returncode, done.stdout) == (1, "")
    assert "or this is its admin listener; penstock serve prints both addresses" in done.stderr


def test_nothing_answered_is_a_failure(tool, threaded_service):
    threaded_service.break_next = 10**6
    done = tool.run("bench", threaded_service.target, *SMALL, "--warmup", 0, "--concurrency", 12)
    assert done.returncode == 1
    assert re.search(r"0 of 12 answered\n +12 UNAVAILABLE: the worker is gone\n", done.stdout)
    assert "WARNING: no request was answered" in done.stdout


def test_another_model_or_nowhere_to_write(tool, threaded_service, tmp_path):
    done = tool.run("bench", threaded_service.target, "--model", "gpt")
    assert done.stderr == f"penstock bench: --model: {threaded_service.target} serves fake, not gpt\n"
    done = tool.run("bench", threaded_service.target, "--json", tmp_path / "no" / "x.json")
    assert done.stderr == f"penstock bench: --json: cannot write {tmp_path}/no/x.json\n"
    assert threaded_service.starts == []


async def test_a_service_that_never_answers_is_given_up_after_the_deadline(service, monkeypatch):
    monkeypatch.setattr(bench_grpc, "_GRACE_SECONDS", 0.05)
    asked = Trace([BenchRequest(0, list(b"silent"), 5), BenchRequest(1, list(b"echo"), 4)], ClosedLoop(2))
    async with GrpcCaller(ConnectionOptions(service.target), timeout_s=1.0) as caller:
        report = await run(asked, caller)
        assert [(record.status, bytes(record.token_ids)) for record in report.records] == [
            ("DEADLINE_EXCEEDED", b""),
            ("OK", b"echo"),
        ]
        async with asyncio.timeout(120):
            while not service.cancelled:  # noqa: ASYNC110 - the service tells nobody
                await asyncio.sleep(0.01)


async def test_text_only_output_cannot_be_counted(service):
    async with GrpcCaller(ConnectionOptions(service.target)) as caller:
        with pytest.raises(InvalidOption, match=r"^format: expected token_ids or text_and_token_ids"):
            await run(RandomLoad(vocab_size=90, options={"format": "text"}), caller)


def test_the_progress_bar(open_terminal, threaded_service):
    threaded_service.delay = 0.005
    terminal = open_terminal("bench", threaded_service.target, *SMALL, "--num-requests", 50, "--concurrency", 5)
    terminal.wait_for("5 running")
    terminal.wait_for("50 of 50 answered")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--target", "b"], "specify the service once"),
        (["--rate", "3", "--concurrency", "4"], "--rate and --concurrency cannot be combined"),
        (["--rate", "0"], "--rate: expected a number above 0, got 0"),
        (["--burstiness", "2"], "--burstiness needs --rate"),
        (["--prefixes", "2"], "--prefixes needs --prefix-tokens"),
        (["--trace", "t", "--turns", "2"], "a --trace has its own prompts"),
        (["--api", "openai"], "--api openai needs --vocab-size"),
        (["--endpoint", "/v1/x"], "--endpoint needs --api openai"),
        (["--prompt-tokens", "zipf:1"], "--prompt-tokens: expected 512, uniform:128-1024"),
        (["--slo", "ttft=9"], "--slo: expected bounds of ttft"),
        (["--streams", "x"], "--streams: expected a number above 0, got x"),
        (["--set", "temprature=1"], "--set: temprature: unknown field; did you mean temperature?"),
        (["--set", "max_tokens=3"], "--set: max_tokens: set per request; see --output-tokens"),
    ],
)
def test_arguments_that_cannot_be(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_flags_set_the_amount_of_load():
    assert parse_arguments([]).num_requests == 100
    assert parse_arguments(["--duration", "5"]).num_requests is None
    assert parse_arguments(["--streams", "per-request"]).streams is None
    openai = parse_arguments(["--api", "openai", "--vocab-size", "9", "--set", "anything=[1]", "--set", "x="])
    assert openai.settings == ["anything=[1]", "x="]


def test_the_bare_install_names_the_extra(tool, tmp_path):
    tool.command[-1] = (
        "import sys; sys.modules.update(dict.fromkeys(['aiohttp', 'matplotlib', 'uvloop'])); "
        "from penstock.clients.cli.main import main; sys.exit(main())"
    )
    for arguments, package in (
        (("--api", "openai", "--vocab-size", 9), "aiohttp"),
        (("--plot", tmp_path / "x.png"), "matplotlib"),
    ):
        done = tool.run("bench", "127.0.0.1:1", *arguments)
        assert done.returncode == 1
        assert done.stderr == (
            f"penstock bench: this needs {package}, which is not installed; install it: "
            "pip install 'penstock-llm[bench]'\n"
        )
    assert "no service answers" in tool.run("bench", "127.0.0.1:1").stderr


def test_help_has_examples(capsys):
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "line of a trace:" in out
