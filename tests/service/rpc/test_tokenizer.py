"""TokenizerService: no call works on the event loop, and none keeps other tenants from theirs."""

import asyncio
import threading
from collections import Counter

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.clients.host.parse_turns import ParseTurns
from penstock.service.auth.identity import Principal
from penstock.service.errors import Reason, ServiceError
from penstock.service.rpc import tokenizer as tokenizer_service
from penstock.service.text.tokenizer import TokenizerPool
from penstock.service.transport.message_size import SHORT_BYTES
from penstock.v1 import tokenizer_pb2_grpc as pb_grpc

CALLS = {
    "Tokenize": pb.TokenizeRequest(text="hi"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[104, 105]),
    "RenderChat": pb.RenderChatRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])),
    "DescribeTokens": pb.DescribeTokensRequest(token_ids=[104, 257]),
}


class Keys:
    """A key is its tenant's name."""

    def authenticate(self, metadata):
        key = dict(metadata).get("authorization")
        if key is None:
            raise ServiceError(Reason.UNAUTHENTICATED)
        return Principal(key)


async def refused_field(call, details_of):
    """The field that is named where too much was asked for."""
    with pytest.raises(grpc.aio.AioRpcError, match="send less") as error:
        await call
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(error.value)
    assert details["ErrorInfo"].reason == "TOO_EXPENSIVE"
    return details["BadRequest"].field_violations[0].field


@pytest.mark.parametrize("method", CALLS)
async def test_every_call_works_in_the_pool(start_service, monkeypatch, method):
    """A thousand ids take a millisecond, and a call may have many thousands."""
    service = await start_service()
    loops_thread, run, threads = threading.current_thread(), TokenizerPool.run, []

    def noting(pool, work, *arguments):
        def noted():
            threads.append(threading.current_thread())
            return work()

        return run(pool, noted, *arguments)

    monkeypatch.setattr(TokenizerPool, "run", noting)
    await getattr(service.tokenizer, method)(CALLS[method])
    assert threads
    assert loops_thread not in threads


async def test_what_tokens_stand_for(start_service):
    service = await start_service()
    response = await service.tokenizer.DescribeTokens(CALLS["DescribeTokens"])
    assert [(token.text, token.is_special) for token in response.tokens] == [(b"h", False), (b"<|turn|>", True)]
    with pytest.raises(grpc.aio.AioRpcError, match="token_ids"):
        await service.tokenizer.DescribeTokens(pb.DescribeTokensRequest(token_ids=[0, 258]))


async def test_ids_of_too_much_text_are_refused_before_it_is_made(
    start_service, byte_tokenizer, details_of, monkeypatch
):
    service = await start_service()
    detokenize = service.tokenizer.Detokenize
    monkeypatch.setattr(tokenizer_service, "MAX_ANSWER_BYTES", 12)
    assert (await detokenize(pb.DetokenizeRequest(token_ids=[120] * 10))).text == "x" * 10
    assert not (await detokenize(pb.DetokenizeRequest(token_ids=[256] * 10))).text
    broken = pb.DetokenizeRequest(token_ids=[195] * 5)  # each becomes U+FFFD, which is three bytes
    assert await refused_field(detokenize(broken), details_of) == "token_ids"
    monkeypatch.setattr(type(byte_tokenizer), "decode", lambda *_: "")
    long = pb.DetokenizeRequest(token_ids=[120] * 13)
    assert await refused_field(detokenize(long), details_of) == "token_ids"
    special_tokens = pb.DetokenizeRequest(token_ids=[256] * 10, include_special_tokens=True)
    assert await refused_field(detokenize(special_tokens), details_of) == "token_ids"


@pytest.mark.parametrize(
    ("method", "field"),
    [("Tokenize", "text"), ("Detokenize", "token_ids"), ("RenderChat", "chat"), ("DescribeTokens", "token_ids")],
)
async def test_no_answer_is_larger_than_clients_take(start_service, details_of, monkeypatch, method, field):
    call = getattr((await start_service()).tokenizer, method)
    num_bytes = (await call(CALLS[method])).ByteSize()
    monkeypatch.setattr(tokenizer_service, "MAX_ANSWER_BYTES", num_bytes)
    await call(CALLS[method])
    monkeypatch.setattr(tokenizer_service, "MAX_ANSWER_BYTES", num_bytes - 1)
    assert await refused_field(call(CALLS[method]), details_of) == field


class Whole(list[int]):
    """Not to be gone through by C in one go."""

    def __iter__(self):
        raise AssertionError("it was gone through in one go")


async def test_long_lists_are_worked_on_in_slices(start_service, byte_tokenizer, details_of, monkeypatch):
    service = await start_service()
    monkeypatch.setattr(tokenizer_service, "_IDS_AT_ONCE", 3)
    encode, text = type(byte_tokenizer).encode, "abcdefgh"
    monkeypatch.setattr(type(byte_tokenizer), "encode", lambda *arguments: Whole(encode(*arguments)))
    token_ids = list((await service.tokenizer.Tokenize(pb.TokenizeRequest(text=text))).token_ids)
    assert token_ids == list(text.encode())

    sizes = []

    class Noting(Counter[int]):
        def update(self, iterable=None, /, **named):
            sizes.append(0 if iterable is None else len(iterable))
            super().update(iterable, **named)

    monkeypatch.setattr(tokenizer_service, "Counter", Noting)
    monkeypatch.setattr(tokenizer_service, "MAX_ANSWER_BYTES", 60)  # of eight ids, any of which may be of eight bytes
    assert (await service.tokenizer.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))).text == text
    assert (sum(sizes), max(sizes)) == (8, 3)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.tokenizer.Detokenize(pb.DetokenizeRequest(token_ids=[*[0] * 7, 258, 0]))
    assert details_of(error.value)["BadRequest"].field_violations[0].field == "token_ids[7]"


async def test_a_greedy_tenant_delays_only_itself(start_service, byte_tokenizer, monkeypatch, details_of):
    service = await start_service(authenticator=Keys())
    lane = service.server._running.pool._short
    lane._max_waiting_bytes = 100_000
    gate, order, encode = threading.Event(), [], type(byte_tokenizer).encode

    def slow(self, text, *options):
        gate.wait()
        order.append(text[0])
        return encode(self, text, *options)

    monkeypatch.setattr(type(byte_tokenizer), "encode", slow)

    def tokenize(tenant, text):
        call = service.tokenizer.Tokenize(pb.TokenizeRequest(text=text), metadata=(("authorization", tenant),))
        return asyncio.ensure_future(call)

    try:
        greedy = [tokenize("greedy", "g" * 5_000) for _ in range(20)]
        refused, _ = await asyncio.wait(greedy, timeout=120, return_when=asyncio.FIRST_EXCEPTION)
        modest = tokenize("modest", "m")
        await until(lambda: "modest" in lane._jobs)  # a thread is left for it
    finally:
        gate.set()
    error = refused.pop().exception()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
    assert list((await modest).token_ids) == [ord("m")]
    await asyncio.wait(greedy)
    assert order.index("m") < 3 < order.count("g")


async def test_long_lists_of_ids_leave_the_lock_to_the_loop(start_service, monkeypatch):
    """What C does with a list holds Python's lock."""
    rests: list[float] = []
    monkeypatch.setattr(tokenizer_service, "sleep", rests.append)
    service = await start_service()
    stub = pb_grpc.TokenizerServiceStub(service.channel)
    await stub.Detokenize(pb.DetokenizeRequest(token_ids=[104] * tokenizer_service._IDS_AT_ONCE))
    assert rests == []
    await stub.Detokenize(pb.DetokenizeRequest(token_ids=[104] * (3 * tokenizer_service._IDS_AT_ONCE)))
    assert len(rests) == 2
    assert min(rests) > 0


async def test_only_large_messages_take_turns(start_service, monkeypatch):
    portions = []
    portion = ParseTurns.portion

    def counted(turns):
        portions.append(turns)
        return portion(turns)

    monkeypatch.setattr(ParseTurns, "portion", counted)
    service = await start_service()
    stub = pb_grpc.TokenizerServiceStub(service.channel)
    await stub.Tokenize(pb.TokenizeRequest(text="hi"))
    assert portions == []
    large = pb.TokenizeRequest(text="x" * SHORT_BYTES)
    await asyncio.gather(*(stub.Tokenize(large) for _ in range(4)))
    assert len(portions) == 4
    assert len(set(portions)) == 1
