"""Lines in and lines out, and a file of results that an earlier run was killed over."""

import json
from typing import Any

import pytest

from penstock.clients import PenstockError
from penstock.clients.cli.batch_files import (
    BadLine,
    FileResults,
    HttpJob,
    Job,
    answer_record,
    bad_line_record,
    has_failed,
    http_record,
    parse_line,
)
from penstock.clients.events import Choice, ChoiceEnd, Completion, Finished, FinishReason, Timings, Usage


def test_a_line_is_a_job():
    job = parse_line(1, b'\xef\xbb\xbf{"id": "a", "prompt": "hi", "max_tokens": 3}\r\n', {"temperature": 0})
    assert isinstance(job, Job)
    assert (job.id, job.start.text, job.start.sampling.max_tokens) == ("a", "hi", 3)
    assert job.start.sampling.HasField("temperature")


def test_a_blank_line_is_nothing():
    assert parse_line(4, b"  \n", {}) is None


@pytest.mark.parametrize(
    ("raw", "identity", "says"),
    [
        (b"{", None, "line 7: not JSON: "),
        (b"\xff", None, "line 7: not JSON: "),
        (b"[" * 100_000, None, "line 7: not JSON: "),
        (b'{"id": 1, "prompt": "a", "top_p": NaN}', None, "line 7: not JSON: NaN is not JSON"),
        (b"[1]", None, "line 7: expected a JSON object"),
        (b'{"prompt": "a"}', None, "line 7: id: expected a string or an integer, got null"),
        (b'{"id": true, "prompt": "a"}', None, "line 7: id: expected a string or an integer, got true"),
        (b'{"id": 1}', 1, "line 7: prompt: a line has one of"),
        (b'{"id": "x", "prompt": "a", "max_token": 1}', "x", "line 7: max_token: unknown field"),
    ],
)
def test_a_bad_line_is_named_with_its_field(raw, identity, says):
    bad = parse_line(7, raw, {})
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.id) == (7, identity)
    assert bad.message.startswith(says)


HUGE = 10**400
ODD = [
    *({name: HUGE} for name in ("temperature", "top_p", "min_p", "presence_penalty", "top_k", "seed", "n", "priority")),
    *({name: HUGE} for name in ("max_tokens", "timeout_ms", "retain_ms", "logprobs", "stop", "constraint", "tools")),
    {"logit_bias": {"5": HUGE}},
    {"logit_bias": {str(HUGE): 1}},
    {"logit_bias": {"\ud800": 1}},
    {"allowed_token_ids": [HUGE]},
    {"prompt_token_ids": [HUGE], "prompt": None},
    {"\ud800": 1},
    *(
        {name: "\ud800"}
        for name in ("prompt", "stop", "format", "tenant", "continue_from", "temperature", "max_tokens")
    ),
    {"constraint": {"\ud800": "a"}},
    {"constraint": {"regex": "\ud800"}},
    {"constraint": {"choices": ["\ud800"]}},
    {"messages": [{"role": "user", "\ud800": "a"}], "prompt": None},
    {"messages": [{"role": "user", "content": "\ud800"}], "prompt": None},
    {"template_variables": {"a": "\ud800"}, "messages": [{"role": "user", "content": "a"}], "prompt": None},
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:60].encode("ascii", "replace").decode())
def test_an_odd_value_spoils_its_own_line_only(odd, tmp_path):
    """It is no request, and what says so can be written."""
    bad = parse_line(7, json.dumps({"id": 1, "prompt": "a"} | odd).encode(), {})
    assert isinstance(bad, BadLine)
    results = FileResults(tmp_path / "out.jsonl")
    results.write(bad_line_record(bad))
    results.close()
    again = FileResults(tmp_path / "out.jsonl")
    assert again.bad_lines == {bad.key}
    again.close()


OPENAI = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


def test_a_line_in_openais_format_is_a_job():
    job = parse_line(1, json.dumps(OPENAI).encode(), {})
    assert job == HttpJob("a", "/v1/completions", b'{"prompt": "hi"}')


@pytest.mark.parametrize(
    ("change", "identity", "says"),
    [
        ({"custom_id": 1}, None, "custom_id: expected a string, got 1"),
        ({"custom_id": ""}, None, "custom_id: expected a string"),
        ({"method": "GET"}, "a", "method: expected POST"),
        ({"url": "/v1/audio/speech"}, "a", "url: expected one of /v1/chat/completions, "),
        ({"url": ["/v1/completions"]}, "a", "url: expected one of"),
        ({"body": None}, "a", "body: expected an object, got null"),
        ({"body": {"stream": True}}, "a", "body.stream: not supported in a batch"),
    ],
)
def test_a_bad_line_in_openais_format_is_answered_in_it(change, identity, says):
    bad = parse_line(3, json.dumps(OPENAI | change).encode(), {})
    assert isinstance(bad, BadLine)
    assert (bad.id, bad.is_openai) == (identity, True)
    record: Any = bad_line_record(bad)
    assert set(record) == {"id", "custom_id", "line", "response", "error"}
    assert record["custom_id"] == identity
    assert record["error"]["message"].startswith(f"line 3: {says}")


def test_flags_that_set_options_are_not_for_openais_format():
    bad = parse_line(3, json.dumps(OPENAI).encode(), {"temperature": 0})
    assert isinstance(bad, BadLine)
    assert bad.problem.startswith("temperature: flags do not apply to lines in OpenAI's format")


def test_which_lines_out_have_failed():
    assert [has_failed(http_record("a", status, "r", {})) for status in (200, 400, 429, 500)] == [False, *[True] * 3]
    assert has_failed({"id": 1, "error": {}})
    assert not has_failed({"id": 1, "text": "a"})


def answer(num_choices):
    end = ChoiceEnd(FinishReason.LENGTH)
    choices = [Choice(text=f"t{i}", token_ids=[i], end=end) for i in range(num_choices)]
    return Completion(choices, Finished(FinishReason.LENGTH, Usage(5, 0, num_choices), Timings()))


def test_lines_out_have_the_documented_keys():
    assert answer_record("a", answer(1)) == {
        "id": "a",
        "text": "t0",
        "token_ids": [0],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 1, "reasoning_tokens": 0},
    }
    record = answer_record(3, answer(2))
    assert set(record) == {"id", "choices", "usage"}
    assert record["choices"] == [
        {"index": i, "text": f"t{i}", "token_ids": [i], "finish_reason": "length"} for i in range(2)
    ]


def write(path, *records, tail=b""):
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + tail)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_torn_last_line_is_cut_off_and_a_whole_one_ended(tmp_path, cut):
    path = tmp_path / "out.jsonl"
    write(path, {"id": 1}, {"id": "two", "text": "é"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    results = FileResults(path)
    assert set(results.failed) == ({1, "two"} if cut == 1 else {1})
    results.write({"id": 3})
    results.close()
    kept = [json.loads(line)["id"] for line in path.read_bytes().splitlines()]
    assert kept == ([1, "two", 3] if cut == 1 else [1, 3])


def test_what_was_answered_is_remembered_errors_and_bad_lines_too(tmp_path):
    path = tmp_path / "out.jsonl"
    write(
        path,
        {"id": 1},
        {"id": 2, "error": {}},
        {"id": None, "line": 9, "error": {"message": "line 9: not JSON"}},
        {"id": 1, "line": 10, "error": {"message": "line 10: id: an earlier line also has 1"}},
        {"id": "b", "custom_id": "c", "response": {"status_code": 200}, "error": None},
        {"id": "d", "custom_id": "e", "response": {"status_code": 400}, "error": None},
    )
    results = FileResults(path)
    assert results.failed == {1: False, 2: True, "c": False, "e": True}
    assert results.bad_lines == {(None, 9, "not JSON"), (1, None, "id: an earlier line also has 1")}
    results.close()


def test_failed_lines_can_be_taken_out(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, {"id": 1}, {"id": 2, "error": {}}, {"id": 3}, tail=b'{"id": 4')
    results = FileResults(path, retry_failed=True)
    assert results.failed == {1: False, 3: False}
    results.write({"id": 2})
    results.close()
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == [1, 3, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_taking_failed_lines_out_keeps_mode_links_and_neighbours(tmp_path):
    path, link, other = tmp_path / "out.jsonl", tmp_path / "link.jsonl", tmp_path / "out.jsonl.new"
    write(path, {"id": 1}, {"id": 2, "error": {}})
    path.chmod(0o640)
    link.symlink_to(path.name)
    other.write_text("precious")
    FileResults(link, retry_failed=True).close()
    assert link.is_symlink()
    assert path.read_bytes() == b'{"id":1}\n'
    assert path.stat().st_mode & 0o777 == 0o640
    assert other.read_text() == "precious"
    assert set(tmp_path.iterdir()) == {path, link, other}


def test_taking_failed_lines_out_keeps_a_files_other_names(tmp_path):
    path, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    write(path, {"id": 1}, {"id": 2, "error": {}})
    other.hardlink_to(path)
    results = FileResults(path, retry_failed=True)
    results.write({"id": 2})
    results.close()
    assert path.read_bytes() == other.read_bytes() == b'{"id":1}\n{"id":2}\n'


def test_a_line_out_that_is_nested_too_deeply_is_no_line_of_results(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": 1, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(PenstockError, match="line 1 is not a result"):
        FileResults(path)


def test_overwrite_begins_again(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("whatever\n")
    results = FileResults(path, overwrite=True)
    assert results.failed == {}
    results.close()
    assert path.read_bytes() == b""


def test_another_kind_of_file_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(PenstockError, match=r"notes.txt, line 1 is not a result; .*--overwrite"):
        FileResults(path)
    assert path.read_text() == "my notes\n"


def test_two_runs_cannot_write_one_file(tmp_path):
    first = FileResults(tmp_path / "out.jsonl")
    with pytest.raises(PenstockError, match="is being written by another run"):
        FileResults(tmp_path / "out.jsonl")
    first.close()
    FileResults(tmp_path / "out.jsonl").close()


def test_half_a_surrogate_pair_goes_out_as_it_came(tmp_path):
    path = tmp_path / "out.jsonl"
    results = FileResults(path)
    results.write({"id": "\ud800", "text": "é"})
    results.close()
    assert json.loads(path.read_bytes()) == {"id": "\ud800", "text": "é"}
    again = FileResults(path)
    assert set(again.failed) == {"\ud800"}
    again.close()
