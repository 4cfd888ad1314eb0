"""The file of stored responses: who can read it, what is wrong with it, and what becomes of deleted ones."""

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from penstock.clients.errors import PenstockError
from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.stored.response_file import ResponseFile
from penstock.clients.gateway.stored.stored_response import Content, StoredResponse
from penstock.clients.gateway.stored.stored_responses import StoredResponses
from penstock.clients.host.parse_turns import ParseTurns

SECRET = b"a secret of this response"


def response(name="a", **fields):
    return StoredResponse(name, "t", "", "s", SECRET, Content(b'{"x":1}', b'{"output":[]}', b"log"), **fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "responses"


def as_row(response):
    return {name: getattr(response, name) for name in StoredResponse.__slots__ if name != "num_users"}


def test_what_is_written_is_loaded_in_order(path):
    file = ResponseFile(path)
    given = [response("b", expires_at=5.5), response("a", is_live=True), response("c", is_hidden=True)]
    file.write({each.id: each for each in given})
    given[0].content = Content(b'{"x":2}')
    file.write({"b": given[0], "c": None, "unknown": None})
    file.close()
    with closing(ResponseFile(path)) as file:
        assert [as_row(each) for each in file.load()] == [as_row(each) for each in given[:2]]


def test_only_this_user_can_read_it(path):
    path.touch(0o644)
    old_mask = os.umask(0)
    try:
        file = ResponseFile(path)
        file.write({"a": response()})
    finally:
        os.umask(old_mask)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == {"responses": 0o600, "responses-wal": 0o600}
    file.close()
    assert [each.name for each in path.parent.iterdir()] == ["responses"]


def test_what_is_deleted_is_overwritten(path):
    file = ResponseFile(path)
    file.write({each: response(each) for each in "abc"})
    file.close()
    assert SECRET in path.read_bytes()
    file = ResponseFile(path)
    file.write(dict.fromkeys("abc"))
    file.close()
    assert SECRET not in path.read_bytes()


def test_a_failed_write_changes_nothing(path):
    file = ResponseFile(path)
    with pytest.raises(sqlite3.Error):
        file.write({"a": response(), "b": response("b", expires_at=None)})
    assert file.load() == []
    file.write({"a": response()})
    assert [each.id for each in file.load()] == ["a"]
    file.close()


def refusal_of(path):
    with pytest.raises(PenstockError) as caught:
        ResponseFile(path).load()
    text = str(caught.value)
    assert text.startswith(f"--responses-file {path}: ")
    assert "\n" not in text
    return text


def test_a_damaged_file_is_refused(path):
    path.write_bytes(b"no file of SQLite" * 100)
    assert "it is damaged, or no file of SQLite; remove it" in refusal_of(path)


def test_a_file_with_damaged_pages_is_refused(path):
    file = ResponseFile(path)
    file.write({str(number): response(str(number)) for number in range(300)})
    file.close()
    data = bytearray(path.read_bytes())
    data[8192 : len(data) - 4096] = b"\xff" * (len(data) - 12288)
    path.write_bytes(data)
    assert "it is damaged" in refusal_of(path)


def test_a_file_of_another_program_is_refused(path):
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE other (x)")
    database.close()
    assert "another program's or another version's; give a file of its own" in refusal_of(path)


def test_a_place_without_room_for_a_file_is_refused(path):
    assert "No such file or directory; give a file that this user can write" in refusal_of(path / "none")
    assert "Is a directory" in refusal_of(path.parent)


def test_a_file_that_another_process_uses_is_refused(path, monkeypatch):
    monkeypatch.setattr("penstock.clients.gateway.stored.response_file._BUSY_S", 0.0)
    use = (
        "import sys, pathlib; from penstock.clients.gateway.stored.response_file import ResponseFile; "
        f"file = ResponseFile(pathlib.Path({str(path)!r})); print('used', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", use]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"used\n"
        assert "another process uses it; give each gateway a file of its own" in refusal_of(path)
        other.kill()
    ResponseFile(path).close()  # however the other one ended


@pytest.fixture
async def stored(path):
    async with StoredResponses(GatewaySettings(responses_file=path), ParseTurns()) as stored:
        yield stored


@pytest.fixture
def fails(stored, monkeypatch):
    """While this event is set, the file cannot be written."""
    fails, write = threading.Event(), stored._file.write

    def write_or_fail(changes):
        if fails.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        write(changes)

    monkeypatch.setattr(stored._file, "write", write_or_fail)
    return fails


async def test_a_response_that_cannot_be_written_is_not_stored(stored, fails, caplog):
    fails.set()
    assert not await stored.keep(response("x"), {"id": "x", "output": []})
    assert "database or disk is full" in caplog.text
    fails.clear()
    assert await stored.save()
    assert stored._file.load() == []
    assert await stored.keep(response("y"), {"id": "y", "output": []})
    assert [each.id for each in stored._file.load()] == ["y"]


async def test_a_deletion_that_cannot_be_written_is_reported_and_tried_again(stored, fails):
    await stored.keep(response("x"), {"id": "x", "output": []})
    fails.set()
    with pytest.raises(GatewayError, match="still in the gateway's file") as caught:
        await stored.delete(stored.find("x", "t"))
    assert (caught.value.status, caught.value.code) == (503, "responses_unwritable")
    with pytest.raises(Exception, match="is not stored"):
        stored.find("x", "t")
    fails.clear()
    await stored.save()
    assert stored._file.load() == []
