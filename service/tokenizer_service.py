"""TokenizerService: the served model's tokenizer and template, exactly as generation uses them, in the same threads."""

from collections import Counter
from typing import Any

import grpc

from penstock.service.bounds import Validator
from penstock.service.chat_request import check_chat, parse_chat
from penstock.service.errors import Reason, ServiceError
from penstock.service.tokenizer import TokenizerPool
from penstock.v1 import tokenizer_pb2 as pb, tokenizer_pb2_grpc as pb_grpc

MAX_DETOKENIZED_CHARS = 16 << 20
"""Of an answer: a million ids may stand for 100 times as many characters."""

Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerService(pb_grpc.TokenizerServiceServicer):
    """Checks on the loop, works in the pool."""

    def __init__(self, validator: Validator, pool: TokenizerPool) -> None:
        self._validator = validator
        self._pool = pool
        self._tokenizer = pool.tokenizer

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text to ids."""
        self._validator.check(request)
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True

        def work() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(token_ids=self._tokenizer.encode(request.text, adds))

        return await self._pool.run(work, request.ByteSize())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Ids to text."""
        self._validator.check(request)

        def work() -> pb.DetokenizeResponse:
            token_ids = list(request.token_ids)
            self._validator.check_ids(token_ids, "token_ids")
            self._check_size(token_ids)
            return pb.DetokenizeResponse(text=self._tokenizer.decode(token_ids, request.include_special_tokens))

        return await self._pool.run(work, request.ByteSize())

    def _check_size(self, token_ids: list[int]) -> None:
        pieces = self._tokenizer.pieces
        if len(token_ids) * pieces.longest_bytes <= MAX_DETOKENIZED_CHARS:
            return
        num_chars = 0
        for token_id, number in Counter(token_ids).items():
            text = pieces.all[token_id]
            num_chars += number * len(pieces.split[token_id] if text is None else text)
        if num_chars > MAX_DETOKENIZED_CHARS:
            raise ServiceError(
                Reason.TOO_EXPENSIVE,
                f"token_ids: their text has at most {MAX_DETOKENIZED_CHARS:,} characters; it has about {num_chars:,}: "
                "send the ids in several requests",
                field="token_ids",
            )

    async def RenderChat(self, request: pb.RenderChatRequest, context: Context) -> pb.RenderChatResponse:
        """Messages to the prompt."""
        self._validator.check(request)
        check_chat(request.chat, self._tokenizer.shows_tools)

        def work() -> pb.RenderChatResponse:
            chat = parse_chat(request.chat)
            return pb.RenderChatResponse(
                text=self._tokenizer.render_chat(chat), token_ids=self._tokenizer.encode_chat(chat)
            )

        return await self._pool.run(work, request.ByteSize())

    async def DescribeTokens(self, request: pb.DescribeTokensRequest, context: Context) -> pb.DescribeTokensResponse:
        """Ids to what each stands for: 1 us each, and there may be many."""
        self._validator.check(request)
        pieces = self._tokenizer.pieces

        def work() -> pb.DescribeTokensResponse:
            token_ids = list(request.token_ids)
            self._validator.check_ids(token_ids, "token_ids")
            response = pb.DescribeTokensResponse()
            for token_id in token_ids:
                text = pieces.all[token_id]
                response.tokens.add(
                    text=pieces.split[token_id] if text is None else text.encode(),
                    is_special=token_id in pieces.skipped,
                )
            return response

        return await self._pool.run(work, request.ByteSize())
