"""TokenizerService: the served model's tokenizer and chat template, with the code and threads that generation uses."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, sleep
from typing import Any, TypeVar

import grpc

import penstock.v1 as pb
from penstock.scheduler.planning.rate_limit import Rated
from penstock.service.auth.identity import current_principal
from penstock.service.config.limits import Validator
from penstock.service.config.text_size import utf8_bytes
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.chat import check_chat, parse_chat, shows_tools
from penstock.service.text.detokenizer import text_offsets
from penstock.service.text.tokenizer import TokenizerPool
from penstock.service.text.truncation import Truncation
from penstock.v1 import tokenizer_pb2_grpc as pb_grpc

MAX_ANSWER_BYTES = 4 << 20
"""The default limit of gRPC's clients."""
FREE_IDS = 1024
"""The largest number of ids in a call of DescribeTokens that does not count against the rate limit."""
_IDS_AT_ONCE = 1 << 12
"""Longer lists are processed in slices: C code holds Python's lock for a whole list, which blocks the event loop."""
_ID_BYTES = 4
"""The size of an id in a parsed message. ByteSize() would encode all ids on the event loop."""

Context = grpc.aio.ServicerContext[Any, Any]
_WithIds = TypeVar("_WithIds", pb.TokenizeResponse, pb.RenderChatResponse)
_WithOffsets = TypeVar("_WithOffsets", pb.TokenizeResponse, pb.DetokenizeResponse)


class TokenizerService(pb_grpc.TokenizerServiceServicer):
    """The servicer. Checks requests on the event loop and works in the thread pool.

    Calls count against their tenant's rate limit, except small ones of DescribeTokens, which clients make while they
    read a stream, to show its tokens.
    """

    def __init__(self, validator: Validator, pool: TokenizerPool, charge: Callable[[str, Rated], None]) -> None:
        """``charge`` counts a tenant's call, or raises Refused."""
        self._charge = charge
        self._validator = validator
        self._pool = pool
        self._tokenizer = pool.tokenizer

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._count_call()
        self._validator.check(request)
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
        truncation = Truncation.of(request, self._validator.limits.max_model_len)

        def work() -> pb.TokenizeResponse:
            token_ids = self._tokenizer.encode(request.text, adds, truncation)
            return self._with_offsets(_with_ids(pb.TokenizeResponse(), token_ids, "text"), request, token_ids, "text")

        return await self._pool.run(work, request.ByteSize())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self._count_call()
        self._validator.check(request)
        shows_special_tokens = request.include_special_tokens

        def work() -> pb.DetokenizeResponse:
            token_ids = self._checked(request.token_ids)
            self._check_text(token_ids, shows_special_tokens)
            response = pb.DetokenizeResponse(text=self._tokenizer.decode(token_ids, shows_special_tokens))
            _check_answer(response.ByteSize(), "token_ids")
            return self._with_offsets(response, request, token_ids, "token_ids", shows_special_tokens)

        return await self._pool.run(work, _ID_BYTES * len(request.token_ids))

    def _count_call(self) -> None:
        self._charge(current_principal.get().tenant, Rated.TOKENIZER_CALL)

    def _with_offsets(
        self,
        response: _WithOffsets,
        request: pb.TokenizeRequest | pb.DetokenizeRequest,
        token_ids: list[int],
        field: str,
        shows_special_tokens: bool = False,
    ) -> _WithOffsets:
        """Adds its tokens' text offsets to ``response``, if requested, and returns it. Raises ServiceError."""
        if request.include_text_offsets:
            response.text_offsets.extend(text_offsets(self._tokenizer, token_ids, shows_special_tokens))
            _check_answer(response.ByteSize(), field)
        return response

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """Returns a request's ids, checked against the vocabulary. Raises ServiceError."""
        checked: list[int] = []
        for some in _slices(token_ids):
            checked += some
            if max(some) >= self._validator.limits.vocab_size:
                self._validator.check_ids(checked, "token_ids")
        return checked

    def _check_text(self, token_ids: list[int], shows_special_tokens: bool) -> None:
        """Refuses a text that is too long before it is built: a million ids may represent 100 times as many bytes."""
        pieces = self._tokenizer.pieces
        if len(token_ids) * pieces.longest_bytes <= MAX_ANSWER_BYTES:
            return
        counts: Counter[int] = Counter()
        for some in _slices(token_ids):
            counts.update(some)
        texts = pieces.all if shows_special_tokens else pieces.ordinary
        num_bytes = 0
        for token_id, number in counts.items():
            text = texts[token_id]
            num_bytes += number * (len(pieces.split[token_id]) if text is None else utf8_bytes(text))
        _check_answer(num_bytes, "token_ids")

    async def RenderChat(self, request: pb.RenderChatRequest, context: Context) -> pb.RenderChatResponse:
        self._count_call()
        self._validator.check(request)
        check_chat(request.chat, self._tokenizer.chat_template(shows_tools(request.chat)))

        def work() -> pb.RenderChatResponse:
            chat = parse_chat(request.chat)
            response = pb.RenderChatResponse(text=self._tokenizer.render_chat(chat))
            _check_answer(response.ByteSize(), "chat")  # before the text is tokenized
            return _with_ids(response, self._tokenizer.encode_chat(chat), "chat")

        return await self._pool.run(work, request.ByteSize())

    async def DescribeTokens(self, request: pb.DescribeTokensRequest, context: Context) -> pb.DescribeTokensResponse:
        """Returns the text of each id: 1 us each, and there may be many."""
        if len(request.token_ids) > FREE_IDS:
            self._count_call()
        self._validator.check(request)
        pieces = self._tokenizer.pieces

        def work() -> pb.DescribeTokensResponse:
            response = pb.DescribeTokensResponse()
            for token_id in self._checked(request.token_ids):
                response.tokens.add(text=pieces.by_itself(token_id), is_special=token_id in pieces.skipped)
            _check_answer(response.ByteSize(), "token_ids")
            return response

        return await self._pool.run(work, _ID_BYTES * len(request.token_ids))


def _slices(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields slices. Sleeps after each for as long as the caller worked on it; otherwise the event loop would wait for
    Python's lock each time that it had released it."""
    for at in range(0, len(token_ids), _IDS_AT_ONCE):
        began = perf_counter()
        yield token_ids[at : at + _IDS_AT_ONCE]
        if at + _IDS_AT_ONCE < len(token_ids):
            sleep(perf_counter() - began)


def _with_ids(response: _WithIds, token_ids: list[int], field: str) -> _WithIds:
    """Adds ids to ``response`` and returns it. ``field`` is the request's field that they come from. Raises
    ServiceError."""
    num_bytes = response.ByteSize()
    _check_answer(num_bytes, field)
    for some in _slices(token_ids):
        part = type(response)(token_ids=some)
        num_bytes += part.ByteSize()
        _check_answer(num_bytes, field)
        response.MergeFrom(part)
    return response


def _check_answer(num_bytes: int, field: str) -> None:
    if num_bytes > MAX_ANSWER_BYTES:
        raise ServiceError(
            Reason.TOO_EXPENSIVE,
            f"{field}: the response is limited to {MAX_ANSWER_BYTES:,} bytes and would be larger; send less at once",
            field=field,
        )
