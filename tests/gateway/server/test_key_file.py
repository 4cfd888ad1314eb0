"""The gateway's own key, whose file is read again."""

import asyncio
import hashlib

import pytest

from penstock.clients.errors import PenstockError
from penstock.clients.gateway.server.key_file import read_key

COMPLETIONS = "/v1/completions"
FIRST, SECOND = "first" * 8, "second" * 8


@pytest.fixture
def path(tmp_path):
    return tmp_path / "key"


@pytest.fixture
def own_keys(tmp_path, load_keys):
    """What the service knows."""
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in (FIRST, SECOND)]
    (tmp_path / "keys").write_text("".join(f"sha256:{each} gateway\n" for each in hashes))
    return {"authenticator": load_keys(tmp_path / "keys")}


def watched(path, key="one"):
    """The file, and the keys that it passes on."""
    path.write_text(f"{key}\n")
    file, used = read_key(path), list[str]()
    file.on_change = used.append
    return file, used


def look(file):
    take = file.refresh()
    if take is not None:
        take()


def test_a_changed_key_is_passed_on_once(path, caplog):
    file, used = watched(path)
    assert file.value == "one"
    look(file)
    path.write_text("tw")  # and the rest a moment later
    look(file)
    path.write_text("two\n")
    look(file)
    assert used == []
    look(file)
    look(file)
    assert used == ["two"]
    assert "two" not in caplog.text


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", b"\xff", "ключ".encode(), b"x" * 5000])
def test_an_invalid_key_is_logged_once_and_the_last_one_stays(path, caplog, content):
    file, used = watched(path)
    path.write_bytes(content)
    for _ in range(4):
        look(file)
    [record] = caplog.records
    assert record.message.startswith(f"--api-key-file: {path} ")
    assert record.message.endswith("; the key from before stays in use")
    path.unlink()
    look(file)
    assert f"--api-key-file: cannot read {path}: No such file or directory; the key from before" in caplog.text
    path.write_text("two")
    look(file)
    look(file)
    assert used == ["two"]
    path.write_bytes(content)
    with pytest.raises(PenstockError):
        read_key(path)


async def test_requests_go_under_the_new_key_and_those_that_run_end_under_the_old_one(
    start_gateway, own_keys, path, monkeypatch, caplog
):
    monkeypatch.setattr("penstock.clients.gateway.server.app.CHECK_S", 0.02)
    path.write_text(FIRST)
    gateway = await start_gateway(service=own_keys, api_key=FIRST, api_key_file=read_key(path), seconds_per_step=0.002)
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
    running = asyncio.create_task(gateway.post(COMPLETIONS, **body))
    await gateway.until(lambda stats: stats.requests == 1)
    path.write_text("unknown" * 8)
    while (answer := await gateway.post(COMPLETIONS, prompt="a", max_tokens=1)).status_code == 200:
        pass
    assert answer.json()["error"]["code"] == "gateway_key_refused"
    path.write_text(SECOND)
    while (await gateway.post(COMPLETIONS, prompt="a", max_tokens=1)).status_code != 200:
        pass
    assert f"{path} was read again" in caplog.text
    assert (await running).json()["usage"]["completion_tokens"] == 1000
