"""The operators' commands, against `penstock serve` as it runs: the demo model, and API keys."""

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from waiting import wait_until

from penstock.clients import Client
from penstock.clients.cli import main as cli
from penstock.clients.errors import RequestFailed

PENSTOCK = Path(sys.executable).with_name("penstock")
KEY, ADMIN_KEY = "k" * 40, "a" * 40


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A service on any ports; it ends with status 0."""
    keys = tmp_path_factory.mktemp("admin") / "keys"
    lines = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in (KEY, ADMIN_KEY)]
    keys.write_text(f"{lines[0]} acme\n{lines[1]} operators admin\n")
    flags = ["--port=0", "--kv-cache-memory-bytes=64M", "--max-num-seqs=16", "--threads=1", f"--api-keys-file={keys}"]
    with subprocess.Popen([PENSTOCK, "serve", *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            greeting = ""
            while "Ctrl-C stops it." not in greeting:
                line = process.stdout.readline()
                assert line, greeting
                greeting += line
            target, admin = re.findall(r" on (127\.0\.0\.1:\d+)(?: |:|$)", greeting, re.MULTILINE)
            yield SimpleNamespace(target=target, admin=admin, greeting=greeting)
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture
def operator(serving, monkeypatch):
    """What a shell's environment says."""
    monkeypatch.setenv("PENSTOCK_ADMIN", serving.admin)
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_KEY)
    return serving


@pytest.fixture
def client(serving):
    with Client(serving.target, api_key=KEY) as client:
        yield client


def run(capsys, *arguments):
    """What a command printed."""
    assert cli.main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def failure(capsys, *arguments):
    """What it said of its failure, in one line or two."""
    assert cli.main(list(arguments)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def settings(capsys, *arguments):
    return json.loads(run(capsys, "settings", "--json", *arguments))


@contextlib.contextmanager
def running_request(client, max_tokens=15_000):
    """One that has begun; it is cancelled at the end, if it has not ended."""
    begun, leave = threading.Event(), threading.Event()

    def read():
        tokens = []
        for delta in client.stream("long", max_tokens=max_tokens, ignore_eos=True):
            tokens += delta.token_ids
            begun.set()
            if leave.is_set():
                break
        return len(tokens)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert begun.wait(120)
        try:
            yield reading
        finally:
            leave.set()


def test_the_greeting_names_the_administration_and_its_tools(serving):
    lines = [line.strip() for line in serving.greeting.splitlines() if "--admin" in line]
    assert [re.sub(r"^\S+ \S*penstock ", "", line) for line in lines] == [
        f"top --admin {serving.admin}",
        f"explain --admin {serving.admin} REQUEST_ID",
    ]
    assert all(line.startswith("PENSTOCK_API_KEY=YOUR_ADMIN_KEY ") for line in lines)


class TestSettings:
    """`penstock settings`."""

    def test_without_changes_it_prints_them(self, operator, capsys):
        table = run(capsys, "settings")
        assert re.search(r"^policy +fair$", table, re.MULTILINE)
        assert re.search(r"^max-num-seqs +16$", table, re.MULTILINE)
        assert re.search(r"^target-itl +auto$", table, re.MULTILINE)
        assert re.search(r"^\(all others\) +1( +none){5}$", table, re.MULTILINE)

    def test_changes_are_made_and_printed(self, operator, capsys):
        before = settings(capsys)
        etag = before.pop("etag")
        tenants = (
            "--tenant",
            "acme",
            "weight=2.5,max-live-requests=1000,requests-per-second=0.5",
            "--tenant",
            "b",
            "max_tokens=7",
        )
        changed = settings(
            capsys,
            "--etag",
            etag,
            "--policy",
            "deadline",
            "--target-itl",
            "20.5",
            "--max-queued-requests",
            "99",
            *tenants,
        )
        uncapped = dict.fromkeys(
            ("max_prompt_tokens", "max_tokens", "max_live_requests", "requests_per_second", "tokens_per_minute")
        )
        assert changed == settings(capsys)
        assert changed.pop("etag") != etag
        assert changed == before | {
            "policy": "deadline",
            "target_itl": 0.0205,
            "max_queued_requests": 99,
            "tenants": {
                "acme": uncapped | {"weight": 2.5, "max_live_requests": 1000, "requests_per_second": 0.5},
                "b": uncapped | {"weight": 1, "max_tokens": 7},
            },
        }
        table = run(capsys, "settings", "--default-tenant", "max-prompt-tokens=4000", "--forget-tenant", "b")
        assert re.search(r"^acme +2\.5 +none +none +1,000 +0\.5 +none$", table, re.MULTILINE)
        assert re.search(r"^\(all others\) +1 +4,000( +none){4}$", table, re.MULTILINE)
        assert not re.search(r"^b ", table, re.MULTILINE)
        back = ("--policy", "fair", "--target-itl", "0", "--max-queued-requests", str(before["max_queued_requests"]))
        after = settings(capsys, *back, "--default-tenant", "weight=1", "--forget-tenant", "acme")
        assert after == before | {"etag": etag}

    def test_an_etag_of_earlier_settings_changes_nothing(self, operator, capsys):
        etag = re.findall(r"^etag +(\w+)$", run(capsys, "settings"), re.MULTILINE)[0]
        run(capsys, "settings", "--max-queued-requests", "50", "--etag", etag)
        said = failure(capsys, "settings", "--max-queued-requests", "60", "--etag", etag)
        assert "the settings have changed since; get them again" in said
        assert settings(capsys)["max_queued_requests"] == 50
        assert settings(capsys, "--reset", "max-queued-requests")["etag"] == etag

    def test_settings_go_back_to_those_of_the_command_line(self, operator, capsys):
        before = settings(capsys)
        run(capsys, "settings", "--max-num-seqs", "4", "--target-itl", "20", "--tenant", "acme", "weight=2")
        reset = ("--reset", "max-num-seqs", "--reset", "target-itl", "--reset", "tenants")
        assert settings(capsys, *reset, "--max-queued-requests", "50")["max_queued_requests"] == 50
        assert settings(capsys, "--reset", "max-queued-requests") == before

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (["--max-num-seqs", "17"], "--max-num-seqs: is 17; the worker was started with 16"),
            (["--max-num-seqs", "-1"], "--max-num-seqs: -1 is out of range; it must be at least 1"),
            (["--max-queued-tokens", "9" * 40], "--max-queued-tokens: 99999"),
            (
                ["--max-num-batched-tokens", "1"],
                "--max-num-seqs, 16, so that each row gets a token; it is 1; raise it, or lower --max-num-seqs too\n",
            ),
            (["--target-itl", "nan"], "--target-itl: must be 0 to 60,000 ms; it is nan"),
            (["--target-itl", "-1"], "--target-itl: must be at least 0 s and at most 60 s; it is -0.001 s"),
            (["--etag", "x"], "--etag: there is nothing to change; give a change too"),
            (["--reset", "policy", "--policy", "fair"], "--policy and --reset are both given for it; give one of them"),
            (["--tenant", "ok", "", "--tenant", "a/b", "weight=1"], "--tenant a/b: must be letters"),
            (["--tenant", "", "weight=1"], "--tenant '': is required; put the settings of all tenants that are not "),
            (["--tenant", "", "weight=1"], " named into --default-tenant\n"),
            (["--tenant", "a", "", "--tenant", "a", ""], "--tenant a: the tenant is already in this request"),
            (["--tenant", "a", "", "--forget-tenant", "a"], "--tenant a: the tenant is also in --forget-tenant; name"),
            (["--tenant", "a", "max-tokens=0"], "--tenant a: max-tokens: must be at least 1"),
            (["--tenant", "a", "weight=heavy"], "--tenant a: weight must be a number; it is 'heavy'"),
            (["--tenant", "a", "weight"], "--tenant a: weight must be a number; it is ''"),
            (["--tenant", "a", "max-tokens=1.5"], "--tenant a: max-tokens must be a whole number; it is '1.5'"),
            (["--tenant", "a", "max-tokens=-1"], "--tenant a: max-tokens: -1 is out of range"),
            (
                ["--tenant", "a", "speed=1"],
                "--tenant a: 'speed' is not a setting of a tenant; use one of weight, max-prompt-tokens",
            ),
            (["--tenant", "a", "wieght=1"], "--tenant a: 'wieght' is not a setting of a tenant; did you mean weight?"),
            (["--default-tenant", "weight=0"], "--default-tenant: weight: must be at least 0.001"),
            (["--forget-tenant", "ok", "--forget-tenant", "a b"], "--forget-tenant a b: must be letters"),
        ],
    )
    def test_what_is_refused_is_named_as_the_operator_gave_it(self, operator, capsys, arguments, problem):
        said = failure(capsys, "settings", *arguments)
        assert problem in said
        assert len(said) < 300

    def test_the_limit_that_was_set_is_blamed_and_not_the_other(self, operator, capsys):
        before = settings(capsys)
        settings(capsys, "--max-num-seqs", "8", "--max-num-batched-tokens", "8")
        try:
            said = failure(capsys, "settings", "--max-num-seqs", "9")
            assert said == (
                "penstock settings: --max-num-seqs: must be at most --max-num-batched-tokens, 8, so that each row gets "
                "a token; it is 9; lower it, or raise --max-num-batched-tokens too\n"
            )
        finally:
            limits = {name: str(before[name]) for name in ("max_num_seqs", "max_num_batched_tokens")}
            run(capsys, "settings", *(f"--{name.replace('_', '-')}={value}" for name, value in limits.items()))

    def test_an_invalid_number_is_refused_before_any_call(self, capsys):
        assert cli.main(["settings", "--max-num-seqs", "x"]) == 2
        assert "--max-num-seqs: must be a whole number; it is 'x'" in capsys.readouterr().err

    def test_changed_live_under_load_they_lose_no_request_and_change_no_output(self, operator, client, capsys):
        """Shown by 8, on the real model: greedy, so that the outputs can be compared."""
        prompts = ["The kernel " * (1 + 9 * number) for number in range(6)]

        def complete(prompt):
            return client.complete(prompt, max_tokens=40, temperature=0, ignore_eos=True).token_ids

        alone = [complete(prompt) for prompt in prompts]
        changes = [
            *(("--policy", policy) for policy in ("fcfs", "deadline", "priority", "fair")),
            *(("--max-num-seqs", rows) for rows in ("1", "16", "3")),
            *(("--max-num-batched-tokens", tokens) for tokens in ("16", "256")),
            *(("--target-itl", target) for target in ("0.5", "0")),
            ("--max-queued-requests", "100"),
            ("--max-queued-tokens", "100000"),
            ("--tenant", "acme", "weight=0.5,max-live-requests=100"),
            ("--forget-tenant", "acme"),
        ]
        before = settings(capsys)
        with ThreadPoolExecutor(len(prompts)) as pool:
            # Twice, so that the second ones find the prefixes of the first.
            together = [pool.submit(complete, prompt) for prompt in prompts * 2]
            for number, change in enumerate(cycle(changes)):
                # Only with what the last change gives back: a tenant's limits, once given, are taken again.
                if number and number % len(changes) == 0 and all(answer.done() for answer in together):
                    break
                run(capsys, "settings", *change)
        assert [answer.result() for answer in together] == alone * 2
        back = {f"--{name.replace('_', '-')}": str(before[name]) for name in before if name.startswith("max_")}
        assert (
            settings(capsys, "--policy=fair", "--target-itl=0", *[part for pair in back.items() for part in pair])
            == before
        )


class TestDrain:
    """`penstock drain`."""

    def test_it_waits_for_the_last_request(self, operator, client, capsys):
        with running_request(client, max_tokens=300) as reading:
            said = run(capsys, "drain", "--wait")
            assert reading.result() == 300
        assert said == "new requests are refused; 1 is still running\nno request is left\n"
        with pytest.raises(RequestFailed) as error:
            client.complete("x", max_tokens=1)
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
        assert run(capsys, "drain", "--resume") == "new requests are accepted\n"
        assert client.complete("x", max_tokens=1).token_ids

    def test_drain_returns_at_once_by_default(self, operator, client, capsys):
        with running_request(client) as reading:
            assert run(capsys, "drain") == "new requests are refused; 1 is still running\n"
            assert not reading.done()
            run(capsys, "drain", "--resume")

    def test_drain_reports_a_resume_by_another_client(self, operator, client, capsys):
        with running_request(client), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(cli.main, ["drain", "--wait"])
            wait_until(lambda: "1 is still running" in capsys.readouterr().out)
            assert cli.main(["drain", "--resume"]) == 0
            assert waiting.result(120) == 1
        assert "it was resumed" in capsys.readouterr().err

    def test_resume_and_wait_do_not_go_together(self, capsys):
        assert cli.main(["drain", "--resume", "--wait"]) == 2


def test_flush_cache(operator, client, capsys):
    def cached():
        return client.complete("a prompt of some length, " * 10, max_tokens=1).usage.cached_tokens

    cached()
    assert cached() > 0
    assert int(run(capsys, "flush-cache").split()[0].replace(",", "")) > 0
    assert cached() == 0


def test_explain_and_top(operator, client, capsys):
    completion = client.complete("The kernel is", max_tokens=5, ignore_eos=True)
    timeline = run(capsys, "explain", completion.request_id)
    assert f"request      {completion.request_id}  ended: LENGTH" in timeline
    assert "tenant       acme" in timeline
    assert re.search(r"computed \d+ tokens \(step \d+\)", timeline)
    assert "generated 5 tokens" in timeline
    assert run(capsys, "top", "--once", "--interval", "0.1").startswith("SERVING: requests 0, rows 0, waiting 0")


def test_requests_and_cancel(operator, client, capsys):
    with running_request(client) as reading:
        [request] = map(json.loads, run(capsys, "requests", "--tenant", "acme", "--json").splitlines())
        assert (request["state"], request["max_tokens"]) == ("decoding", 15_000)
        assert request["request_id"] in run(capsys, "requests", "--min-age", "0.001")
        assert request["request_id"] not in run(capsys, "requests", "--state", "held", "--state", "waiting")
        assert run(capsys, "cancel", request["request_id"]) == "1 request cancelled\n"
        with pytest.raises(RequestFailed, match="cancelled by an administrator") as error:
            reading.result()
        assert error.value.code is grpc.StatusCode.CANCELLED
    assert len(run(capsys, "requests").splitlines()) == 1
    assert run(capsys, "cancel", "--all", "--yes") == "0 requests cancelled\n"


class TestTrouble:
    """What is said where nothing can be administered."""

    def test_nobody_there(self, capsys):
        said = failure(capsys, "settings", "--admin", "127.0.0.1:1")
        assert "no service answers at 127.0.0.1:1" in said
        assert "--admin HOST:PORT, or $PENSTOCK_ADMIN" in said

    def test_the_callers_address(self, operator, capsys):
        said = failure(capsys, "drain", "--wait", "--admin", operator.target)
        assert f"{operator.target} is not the admin listener" in said

    def test_no_key(self, operator, capsys, monkeypatch):
        monkeypatch.delenv("PENSTOCK_API_KEY")
        assert "pass the key with --api-key-file FILE or in $PENSTOCK_API_KEY" in failure(capsys, "flush-cache")

    def test_a_callers_key(self, operator, capsys, tmp_path):
        (tmp_path / "key").write_text(KEY)
        said = failure(capsys, "drain", "--api-key-file", str(tmp_path / "key"))
        assert "PERMISSION_DENIED: this caller may not administer the service; add the word 'admin'" in said
