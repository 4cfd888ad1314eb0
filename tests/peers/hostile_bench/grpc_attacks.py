"""Attacks over gRPC with a key: constraints, prompts and messages that are slow or are refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

import penstock.v1 as pb
from hostile_bench.attack import PAUSE_S, Attack
from hostile_bench.live_service import ATTACKER_KEY
from penstock.clients.errors import failure_from_call
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_MIB = 1 << 20
_METADATA = (("authorization", f"Bearer {ATTACKER_KEY}"),)
_CHOICE_BYTES = (120_000, 90_000, 60_000)
"""The largest one that the service accepts on this machine is used."""

Request = pb.GenerateOneRequest


def constraint_choice(attack: Attack) -> None:
    """Asks for 64 outputs that must be one text of 60 to 120 KB: all of their tokens are forced."""
    texts = ["A" * size for size in _CHOICE_BYTES]
    constraints = [pb.Constraint(choices=pb.StringChoices(values=[text])) for text in texts]
    _generate(attack, [_request(constraint, 64) for constraint in constraints])


def constraint_lark(attack: Attack) -> None:
    """Asks for 8 outputs of a grammar of 30 bytes that is ambiguous without end."""
    _generate(attack, [_request(pb.Constraint(lark="start: s\ns: s s s | s s | /./"), 8)])


def refused_prompts(attack: Attack) -> None:
    """Sends prompts of 4 MiB whose tokens are too many."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="7" * (4 * _MIB - 64))])
    request = pb.CompleteRequest(start=pb.GenerationStart(chat=chat))
    _repeat(attack, request.ByteSize(), lambda stubs: stubs[0].Complete(request, metadata=_METADATA), 3)


def refused_tokenize(attack: Attack) -> None:
    """Sends texts of 4 MiB whose tokens are too many for an answer."""
    request = pb.TokenizeRequest(text="a b " * _MIB)
    _repeat(attack, request.ByteSize(), lambda stubs: stubs[1].Tokenize(request, metadata=_METADATA), 2)


def map_collisions(attack: Attack) -> None:
    """Sends 160 KB of map keys that share a place in protobuf's hash table."""
    number = pb.SamplingParams.DESCRIPTOR.fields_by_name["logit_bias"].number
    keys = ((key << 16) & 0xFFFFFFFF for key in range(13_000))
    bias = b"".join(_field(number, b"\x08" + _varint(key) + b"\x15\0\0\x80?") for key in keys)
    start = pb.GenerationStart(text="x").SerializeToString()
    start += _field(pb.GenerationStart.DESCRIPTOR.fields_by_name["sampling"].number, bias)
    raw = _field(pb.CompleteRequest.DESCRIPTOR.fields_by_name["start"].number, start)

    async def run() -> None:
        async with grpc.aio.insecure_channel(attack.grpc) as channel:
            call: Any = channel.unary_unary("/penstock.v1.GenerationService/Complete")
            await _run_at_once(attack, len(raw), lambda: call(raw, metadata=_METADATA), 4)

    asyncio.run(run())


# ----------------------------------------------------------------------------------------------------------------------


def _request(constraint: pb.Constraint, n: int) -> Request:
    sampling = pb.SamplingParams(max_tokens=8000, n=n)
    return Request(start=pb.GenerationStart(text="Once", sampling=sampling, constraint=constraint))


def _generate(attack: Attack, requests: list[Request]) -> None:
    """Sends the first of the requests that is not invalid, again and again."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(attack.grpc) as channel:
            stub = GenerationServiceStub(channel)
            while attack.is_on:
                answer = await _stream(attack, stub, requests[0])
                if answer.startswith("INVALID_ARGUMENT") and len(requests) > 1:
                    del requests[0]
                await asyncio.sleep(PAUSE_S)

    asyncio.run(run())


async def _stream(attack: Attack, stub: Any, request: Request) -> str:
    """Reads an output to its end; counts the answer and whether there was any output."""
    # Without a deadline: the service refuses a request that cannot meet its own.
    call = stub.GenerateOne(request, metadata=_METADATA)
    has_output = False
    try:
        async with asyncio.timeout(attack.left_s):
            async for reply in call:
                if reply.deltas and not has_output:
                    has_output = True
                    attack.answers["with output"] += 1
        answer = "OK"
    except TimeoutError:
        call.cancel()
        answer = "open at the end"
    except grpc.aio.AioRpcError as error:
        answer = _answer(attack, error)
    attack.count(request.ByteSize(), answer)
    return answer


def _repeat(attack: Attack, size: int, call: Callable[[Any], Awaitable[object]], at_once: int) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(attack.grpc) as channel:
            stubs = GenerationServiceStub(channel), TokenizerServiceStub(channel)
            await _run_at_once(attack, size, lambda: call(stubs), at_once)

    asyncio.run(run())


async def _run_at_once(attack: Attack, size: int, call: Callable[[], Awaitable[object]], number: int) -> None:
    async def repeat() -> None:
        while attack.is_on:
            try:
                await asyncio.wait_for(call(), attack.left_s)
                answer = "OK"
            except grpc.aio.AioRpcError as error:
                answer = _answer(attack, error)
            except TimeoutError:
                answer = "open at the end"
            attack.count(size, answer)
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(repeat() for _ in range(number)))


def _answer(attack: Attack, error: grpc.aio.AioRpcError) -> str:
    """A call's code and the service's reason for it."""
    failure = failure_from_call(error, attack.grpc)
    return failure.code.name + (f" {failure.reason}" if failure.reason else "")


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content
