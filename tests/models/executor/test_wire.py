"""Frames survive any cutting of the stream, and a broken stream is an error, never a guess."""

import socket
import threading

import msgspec
import pytest

from penstock.models.executor.wire import (
    HEADER,
    MAX_FRAME_BYTES,
    Channel,
    FrameBuffer,
    FrameKind,
    WireError,
    encode_frame,
)
from penstock.scheduler.plan import (
    AddedRow,
    Chunk,
    Decode,
    PromptLogprobsPart,
    RowBlocks,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from penstock.scheduler.worker_config import WorkerConfig

SAMPLING = SamplingParams(seed=2**64 - 1, bad_words=((1, 2), (3,)), logit_bias=((4, -1.5),))
PLAN = StepPlan(
    7,
    [3],
    [AddedRow(3, 2, [1, 2, 3], 2, 0, [9], SAMPLING)],
    [RowBlocks(1, [4, 5])],
    [Chunk(3, 0, 3)],
    [Decode(1, 1)],
)
LOGPROBS = TokenLogprobs(1, [-0.5], [6], [-0.25])
RESULT = StepResult(7, [RowResult(3, 2, 3, [6], LOGPROBS)], [PromptLogprobsPart(3, 2, 1, LOGPROBS)], 5, 6)
FRAMES = [
    (FrameKind.CONFIG, WorkerConfig(model="m")),
    (FrameKind.PLAN, PLAN),
    (FrameKind.ALIVE, None),
    (FrameKind.RESULT, RESULT),
]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100_000])
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(step):
    stream = b"".join(encode_frame(kind, body) for kind, body in FRAMES)
    buffer = FrameBuffer()
    received = [frame for i in range(0, len(stream), step) for frame in buffer.feed(stream[i : i + step])]
    assert received == FRAMES


def test_a_partial_frame_gives_nothing():
    buffer = FrameBuffer()
    assert list(buffer.feed(encode_frame(FrameKind.RESULT, RESULT)[:-1])) == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (HEADER.pack(3, 99) + b"abc", "kind 99"),
        (HEADER.pack(MAX_FRAME_BYTES + 1, FrameKind.PLAN), str(MAX_FRAME_BYTES + 1)),
        (HEADER.pack(1, FrameKind.PLAN) + b"\xc1", "PLAN"),
        (encode_frame(FrameKind.FAILED, 5), "FAILED"),
        (HEADER.pack(0, FrameKind.RESULT), "RESULT"),
    ],
)
def test_a_broken_stream_is_an_error(data, says):
    with pytest.raises(WireError, match=says):
        list(FrameBuffer().feed(data))


def test_a_plan_with_wrong_types_does_not_decode():
    body = msgspec.msgpack.encode([7, ["not a row"], [], [], [], []])
    with pytest.raises(WireError, match="PLAN"):
        list(FrameBuffer().feed(HEADER.pack(len(body), FrameKind.PLAN) + body))


def test_a_frame_over_the_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr("penstock.models.executor.wire.MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="over the limit"):
        encode_frame(FrameKind.FAILED, "x" * 200)


def test_threads_that_send_at_once_do_not_mix_their_frames():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)

        def send(text: str) -> None:
            for _ in range(50):
                channel.send(FrameKind.FAILED, text)

        threads = [threading.Thread(target=send, args=(f"{i}" * 5000,)) for i in range(4)]
        for thread in threads:
            thread.start()
        frames = Channel(ours).frames()
        texts = [next(frames)[1] for _ in range(200)]
        for thread in threads:
            thread.join()
    assert sorted(texts) == sorted(f"{i}" * 5000 for i in range(4) for _ in range(50))
