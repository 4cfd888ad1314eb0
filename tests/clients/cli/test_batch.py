"""``penstock generate --target``: the command as a process, against a service that fails where it is told to."""

import json
import os
import signal
from collections import Counter

import pytest
from waiting import wait_until

from penstock.service.app.embedded import local_service


@pytest.fixture
def batch(tool, threaded_service, tmp_path):
    """Runs a file of these lines against the service."""

    class Run:
        input = tmp_path / "in.jsonl"
        output = tmp_path / "out.jsonl"
        service = threaded_service

        def arguments(self, *more):
            return (
                "generate", "--target", self.service.target, "--input", self.input, "--output", self.output, *more,
            )  # fmt: skip

        def write(self, *lines):
            self.input.write_text(
                "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
            )

        def __call__(self, *more):
            return tool.run(*self.arguments(*more))

        def start(self, *more):
            return tool.start(*self.arguments(*more))

        def records(self):
            return [json.loads(line) for line in self.output.read_text().splitlines()]

    return Run()


def num_sampled(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_every_kind_of_line_is_answered(batch):
    batch.write(
        {"id": "text", "prompt": "hello", "max_tokens": 4},
        {"id": 2, "prompt_token_ids": [104, 105]},
        {"id": "chat", "messages": [{"role": "user", "content": "hey"}], "temperature": 0},
        {"id": "two", "prompt": "ab", "n": 2},
        "",
        {"id": "logs", "prompt": "ab", "logprobs": 0},
        {"id": "texts", "prompt": "é", "logprobs": 0, "include_token_texts": True},
    )
    done = batch("--set", "seed=5", "--set", "timeout_ms=60000")
    assert done.returncode == 0, done.stderr
    records = {record["id"]: record for record in batch.records()}
    assert records["text"] == {
        "id": "text",
        "text": "hell",
        "token_ids": [104, 101, 108, 108],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 5, "cached_tokens": 1, "output_tokens": 4, "reasoning_tokens": 0},
    }
    assert (records[2]["text"], records["chat"]["text"]) == ("hi", "hey")
    assert [choice["text"] for choice in records["two"]["choices"]] == ["ab", "ab"]
    assert records["logs"]["logprobs"]["chosen"] == [-0.5, -0.5]
    assert "chosen_texts" not in records["logs"]["logprobs"]
    assert records["texts"]["logprobs"]["chosen_texts"] == ["é"]
    assert {(start.sampling.seed, start.timeout_ms) for start in batch.service.starts} == {(5, 60_000)}
    assert "6 lines done, 0 failed in all" in done.stderr


def test_bad_lines_are_answered_with_line_and_field_and_nothing_is_lost(batch):
    batch.write(
        {"id": 1, "prompt": "one"},
        "{not json",
        {"id": 2, "prompt": "two", "max_tokns": 3},
        {"id": 3},
        {"id": 1, "prompt": "again"},
        {"id": 5, "prompt": "fail INVALID_ARGUMENT"},
        {"id": 6, "prompt": "six"},
    )
    for _ in range(2):  # the second changes nothing
        done = batch()
        assert done.returncode == 1
        records = batch.records()
        assert sorted(r["id"] for r in records if "text" in r) == [1, 6]
        assert len(records) == 7
        assert [record["error"]["message"] for record in records if record["id"] == 5] == ["as you wish"]
        errors = {record["line"]: record["error"] for record in records if "line" in record}
        assert errors[2]["message"].startswith("line 2: not JSON: ")
        assert errors[3]["message"].startswith("line 3: max_tokns: unknown field")
        assert errors[4]["message"].startswith("line 4: prompt: ")
        assert errors[5]["message"].startswith("line 5: id: an earlier line also has 1")
        assert {error["code"] for error in errors.values()} == {"INVALID_ARGUMENT"}
    assert "7 were already done, 5 failed in all" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_corrected_line_is_sent_and_a_new_fault_is_reported(batch):
    good = {"id": "good", "prompt": "one"}
    for bad in ("not JSON", {"id": "x", "prompt": "two", "max_tokens": "x"}):
        batch.write(good, bad)
        assert batch().returncode == 1
    assert {record["id"] for record in batch.records()} == {"good", None, "x"}
    batch.write({"id": "first", "prompt": "zero"}, good, {"id": "x", "prompt": "two"})
    done = batch()
    assert done.returncode == 0, done.stderr
    assert {record["id"] for record in batch.records() if "text" in record} == {"first", "good", "x"}
    assert "2 lines done, 1 were already done, 0 failed in all" in done.stderr


def test_lines_in_openais_format_are_answered_in_it(tool, tmp_path):
    def line(name, url, **body):
        return {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": {"model": "demo", **body}}

    asked = [
        line("chat", "chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4),
        line("text", "completions", prompt="The", max_tokens=4),
        line("vector", "embeddings", input="The"),
        line("refused", "completions", prompt=7),
        {"id": 1, "prompt": "The", "max_tokens": 4},
    ]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in asked))
    with local_service("demo", max_model_len=256) as target:
        files = ("--target", target, "--input", tmp_path / "in", "--output", tmp_path / "out")
        for _ in range(2):  # the second changes nothing
            assert tool.run("generate", *files).returncode == 1
    records = [json.loads(each) for each in (tmp_path / "out").read_text().splitlines()]
    assert len(records) == 5
    answers = {record["custom_id"]: record for record in records if "custom_id" in record}
    assert [answers[name]["response"]["status_code"] for name in ("chat", "text", "vector", "refused")] == [200] * 3 + [
        400
    ]
    assert {answer["error"] for answer in answers.values()} == {None}
    objects = [answers[name]["response"]["body"]["object"] for name in ("chat", "text", "vector")]
    assert objects == ["chat.completion", "text_completion", "list"]
    assert answers["refused"]["response"]["body"]["error"]["param"] == "prompt"
    assert all(answer["response"]["request_id"] for answer in answers.values())


def test_killed_in_the_middle_it_goes_on_and_answers_each_line_once(batch):
    batch.service.delay = 0.004
    batch.write(*({"id": i, "prompt": f"prompt number {i}"} for i in range(60)))
    first = batch.start("--concurrency", "4")
    try:
        wait_until(lambda: num_sampled(batch.output) >= 12)
    finally:
        first.kill()
        first.communicate()
    kept = {record["id"] for record in batch.records()}
    assert 12 <= len(kept) < 60
    with batch.output.open("ab") as torn:
        torn.write(b'{"id": 59, "text": "prom')
    batch.service.delay = 0.0
    batch.service.starts.clear()
    done = batch()
    assert done.returncode == 0, done.stderr
    assert Counter(record["id"] for record in batch.records()) == Counter(range(60))
    assert all(record["text"] == f"prompt number {record['id']}" for record in batch.records())
    asked = {int(start.text.rpartition(" ")[2]) for start in batch.service.starts}
    assert asked == set(range(60)) - kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_how_to_resume(batch, number):
    batch.write({"id": 1, "prompt": "one"}, {"id": 2, "prompt": "hang"})
    process = batch.start()
    wait_until(lambda: num_sampled(batch.output) == 1)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"run the same command again to resume" in err
    assert b"Traceback" not in err
    assert [record["id"] for record in batch.records()] == [1]
    wait_until(lambda: batch.service.streams_ended == 1)


def test_busy_refusals_are_retried(batch):
    batch.write({"id": 1, "prompt": "busy 3"}, {"id": 2, "prompt": "fail RESOURCE_EXHAUSTED"})
    done = batch()
    records = {record["id"]: record for record in batch.records()}
    assert records[1]["text"] == "busy 3"
    assert records[2]["error"]["code"] == "RESOURCE_EXHAUSTED"  # without a hint it is too large, now and later
    assert done.returncode == 1
    assert len(batch.service.starts) == 5


def test_a_stream_that_breaks_costs_nothing(batch):
    batch.service.break_next = 2
    batch.write(*({"id": i, "prompt": f"prompt {i}"} for i in range(8)))
    done = batch()
    assert done.returncode == 0, batch.records()
    assert Counter(record["id"] for record in batch.records()) == Counter(range(8))


def test_a_service_that_is_gone_stops_the_job_and_is_no_answer(batch):
    batch.service.break_next = 1000
    batch.write(*({"id": i, "prompt": f"prompt {i}"} for i in range(8)))
    done = batch("--retry-for", "0.5")
    assert done.returncode == 1
    assert "run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert batch.records() == []
    batch.service.break_next = 0
    assert batch().returncode == 0
    assert Counter(record["id"] for record in batch.records()) == Counter(range(8))


def test_unavailable_for_a_single_request_counts_as_an_answer(batch):
    batch.write({"id": 1, "prompt": "fail UNAVAILABLE"}, {"id": 2, "prompt": "two"})
    assert batch("--retry-for", "0").returncode == 1
    records = {record["id"]: record for record in batch.records()}
    assert records[1]["error"]["code"] == "UNAVAILABLE"
    assert records[2]["text"] == "two"


def test_failed_lines_are_retried_on_demand(batch):
    batch.write({"id": 1, "prompt": "one"}, {"id": 2, "prompt": "fail INTERNAL"})
    assert batch().returncode == 1
    batch.write({"id": 1, "prompt": "one"}, {"id": 2, "prompt": "two"})
    assert batch().returncode == 1
    assert batch("--retry-failed").returncode == 0
    assert [(record["id"], record["text"]) for record in batch.records()] == [(1, "one"), (2, "two")]


def test_concurrency_is_bounded(batch):
    batch.service.delay = 0.001
    live, most = 0, 0
    answer = batch.service._answer

    async def counted(start, outgoing):
        nonlocal live, most
        live += 1
        most = max(most, live)
        await answer(start, outgoing)
        live -= 1

    batch.service._answer = counted
    batch.write(*({"id": i, "prompt": f"prompt {i}"} for i in range(20)))
    assert batch("--concurrency", "3").returncode == 0
    assert most == 3


def test_pipes(tool, threaded_service):
    arguments = ("generate", "--target", threaded_service.target, "--input", "-", "--output", "-")
    done = tool.run(*arguments, text='{"id": 1, "prompt": "hé"}\n{"id": 2, "prompt": "ho"}')
    assert done.returncode == 0, done.stderr
    assert {(r["id"], r["text"]) for r in map(json.loads, done.stdout.splitlines())} == {(1, "hé"), (2, "ho")}


def test_a_pipe_is_answered_line_by_line_until_its_reader_leaves(tool, threaded_service):
    arguments = ("generate", "--target", threaded_service.target, "--input", "-", "--output", "-")
    process = tool.start(*arguments, stdin=-1)
    process.stdin.write(b'{"id": 1, "prompt": "a"}\n')
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["text"] == "a"
    process.stdout.close()
    process.stdin.write(b'{"id": 2, "prompt": "b"}\n')
    process.stdin.flush()
    assert process.wait(120) == 141
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()


def test_on_a_terminal_lines_are_typed_and_progress_is_shown(batch, open_terminal):
    terminal = open_terminal("generate", "--target", batch.service.target, "--input", "-", "--output", batch.output)
    terminal.wait_for("0 lines")
    terminal.type('{"id": 1, "prompt": "hello"}\n')
    wait_until(lambda: num_sampled(batch.output) == 1)
    terminal.type("\x04")
    assert "tokens/s" in terminal.wait_for("1 lines done")
    assert terminal.end() == 0


def test_a_model_that_runs_here(tool, tmp_path):
    (tmp_path / "in").write_text('{"id": 1, "prompt": "The", "max_tokens": 4, "ignore_eos": true}\n' * 2)
    files = ("--input", tmp_path / "in", "--output", tmp_path / "out")
    refused = tool.run("generate", "demo", *files, "--max-model-len", "many")
    assert refused.returncode == 1
    assert refused.stderr.startswith("penstock generate: --max-model-len: ")
    done = tool.run("generate", "demo", *files, "--max-model-len", "256", "--no-enable-prefix-caching")
    assert done.returncode == 1, done.stderr
    refusal, answer = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert refusal["error"]["message"] == "line 2: id: an earlier line also has 1"
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 4)


def test_a_device_takes_results_too(batch, tool):
    batch.write({"id": 1, "prompt": "one"})
    done = tool.run("generate", "--target", batch.service.target, "--input", batch.input, "--output", "/dev/null")
    assert done.returncode == 0, done.stderr


def test_the_same_file_twice_is_refused(batch, tool):
    batch.write({"id": 1, "prompt": "one"})
    done = tool.run("generate", "--target", "x", "--input", batch.input, "--output", batch.input)
    assert done.returncode == 2
    assert "the same file" in done.stderr
    assert batch.input.read_text()


def test_nobody_listening_writes_nothing(tool, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "one"}\n')
    done = tool.run(
        "generate", "--target", "127.0.0.1:1", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"
    )
    assert done.returncode == 1
    assert done.stderr == "penstock generate: no service answers at 127.0.0.1:1: Connection refused\n"
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_full_disk_is_reported(tool, threaded_service, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "one"}\n')
    with open("/dev/full", "wb") as full:
        arguments = ("generate", "--target", threaded_service.target, "--input", tmp_path / "in.jsonl", "--output", "-")
        process = tool.start(*arguments, stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert b"No space left on device" in err
    assert b"Traceback" not in err
