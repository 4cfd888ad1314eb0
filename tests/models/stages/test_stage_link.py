"""The links between stages: who is let in, and what ends a link."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from penstock.models.backends import stage_link
from penstock.models.backends.stage_link import (
    StageBatch,
    StageFrame,
    StageLink,
    accept_ranks,
    connect,
    listen,
)
from penstock.models.backends.tensor_parallel import PeerLost
from penstock.scheduler.worker_config import Meeting, WorkerConfig

SECRET = bytes(range(32))


@pytest.fixture
def config(tmp_path):
    return WorkerConfig("model", pipeline_parallel_size=3, meeting=Meeting(directory=str(tmp_path), secret=SECRET))


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield StageLink(ours, "ours"), theirs


def of_stage(config, stage, secret=SECRET):
    meeting = msgspec.structs.replace(config.meeting, secret=secret)
    return msgspec.structs.replace(config, pipeline_parallel_rank=stage, meeting=meeting)


def test_only_missing_stages_with_the_secret_are_let_in(config):
    listener = listen(config)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_ranks, config, listener)
        garbage = stage_link._connected(config)
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        refused = [StageLink(garbage, "garbage"), *(connect(of_stage(config, stage)) for stage in (0, 3))]
        refused += [connect(of_stage(config, 1, secret)) for secret in (b"", bytes(32), SECRET[:31])]
        twice = [connect(of_stage(config, 2)) for _ in range(2)]
        first = connect(of_stage(config, 1))
        links = accepted.result()
    for link in refused:
        with pytest.raises(PeerLost):
            link.receive(StageFrame.READY)
    for link in links:
        link.send(StageFrame.READY, None)
    first.receive(StageFrame.READY)
    assert sorted(map(is_let_in, twice)) == [False, True]
    for link in (*links, *refused, *twice, first):
        link.close()


def is_let_in(link):
    """Whether the first stage answers, and does not end the connection."""
    try:
        link.receive(StageFrame.READY)
    except PeerLost:
        return False
    return True


def test_a_connection_that_says_nothing_ends(config, monkeypatch, pair):
    monkeypatch.setattr(stage_link, "HELLO_S", 0.01)
    link, _ = pair
    with pytest.raises(PeerLost):
        link.receive_hello()


def test_strangers_keep_no_stage_waiting_and_get_no_memory(config, monkeypatch):
    monkeypatch.setattr(stage_link, "HELLO_S", 3600.0)
    listener = listen(config)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_ranks, config, listener)
        silent, greedy = stage_link._connected(config), stage_link._connected(config)
        greedy.sendall(stage_link._HEADER.pack(StageFrame.HELLO, 1, 1 << 33))
        stages = [connect(of_stage(config, stage)) for stage in (1, 2)]
        links = accepted.result()
    with pytest.raises(PeerLost):
        StageLink(greedy, "greedy").receive(StageFrame.READY)
    for connection in (silent, greedy):
        connection.close()
    for link in (*links, *stages):
        link.close()


def test_a_frame_of_any_size_comes_whole(pair):
    link, theirs = pair
    numbers, floats = np.arange(1 << 16), np.linspace(0, 1, 1 << 20, dtype=np.float32)
    batch = StageBatch(3, 2, 1, 4, computed_us=7)
    sender = threading.Thread(target=link.send, args=(StageFrame.BATCH, batch, (numbers, np.empty(0), floats)))
    sender.start()
    body, data = StageLink(theirs, "theirs").receive(StageFrame.BATCH)
    sender.join()
    assert body == batch
    assert (data[: numbers.nbytes].view(np.int64) == numbers).all()
    assert (data[numbers.nbytes :].view(np.float32) == floats).all()


@pytest.mark.parametrize(
    "sent",
    [
        stage_link._HEADER.pack(99, 1, 0) + b"\xc0",
        stage_link._HEADER.pack(StageFrame.BATCH, 1, 0) + b"\xc0",
        stage_link._HEADER.pack(StageFrame.READY, 1 << 17, 0),
        stage_link._HEADER.pack(StageFrame.READY, 1, 1 << 40),
        stage_link._HEADER.pack(StageFrame.READY, 1, 0) + b"\xc1",
        b"short",
    ],
)
def test_what_is_not_a_frame_ends_the_link(pair, sent):
    link, theirs = pair
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match=r"^ours: "):
        link.receive(StageFrame.READY)


def test_a_link_that_is_closed_wakes_who_receives(pair):
    link, _ = pair
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(link.receive, StageFrame.READY)
        link.close()
        with pytest.raises(PeerLost):
            received.result()


def test_a_first_stage_that_never_listens_is_reported(config, monkeypatch):
    monkeypatch.setattr(stage_link, "CONNECT_S", 0.0)
    with pytest.raises(PeerLost, match="rank 0 cannot be reached: "):
        connect(of_stage(config, 1))
