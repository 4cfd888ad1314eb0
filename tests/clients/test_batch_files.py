"""Lines in and lines out, and a file of results that an earlier run was killed over."""

import json

import pytest

from penstock.clients import PenstockError
from penstock.clients.batch_files import BadLine, FileResults, Job, answer_record, parse_line
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
        (b'{"prompt": "a"}', None, "line 7: id: expected text or an integer, got null"),
        (b'{"id": true, "prompt": "a"}', None, "line 7: id: expected text or an integer, got true"),
        (b'{"id": 1}', 1, "line 7: prompt: a line has one of"),
        (b'{"id": "x", "prompt": "a", "max_token": 1}', "x", "line 7: max_token: there is no such field"),
    ],
)
def test_a_bad_line_is_named_with_its_field(raw, identity, says):
    bad = parse_line(7, raw, {})
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.id) == (7, identity)
    assert bad.message.startswith(says)


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
        "usage": {"prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 1},
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
    assert results.ids == ({1, "two"} if cut == 1 else {1})
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
        {"id": None, "line": 9, "error": {}},
        {"id": 1, "line": 10, "error": {}},
    )
    results = FileResults(path)
    assert (results.ids, results.bad_lines, results.num_failed) == ({1, 2}, {9, 10}, 3)
    results.close()


def test_failed_lines_can_be_taken_out(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, {"id": 1}, {"id": 2, "error": {}}, {"id": 3}, tail=b'{"id": 4')
    results = FileResults(path, retry_failed=True)
    assert (results.ids, results.num_failed) == ({1, 3}, 0)
    results.write({"id": 2})
    results.close()
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == [1, 3, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_overwrite_begins_again(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("whatever\n")
    results = FileResults(path, overwrite=True)
    assert results.ids == set()
    results.close()
    assert path.read_bytes() == b""


def test_another_kind_of_file_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(PenstockError, match=r"notes.txt, line 1 is no line of results; .*--overwrite"):
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
    assert again.ids == {"\ud800"}
    again.close()
