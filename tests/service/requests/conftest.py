"""Builds requests from starts, with the byte tokenizer."""

import time

import pytest

from penstock.service.config.field_rules import ModelLimits
from penstock.service.config.limits import Validator
from penstock.service.requests.generate import RequestBuilder, ResponseMode
from penstock.service.requests.grammar_check import GrammarChecks
from penstock.service.requests.preparation import Origin
from penstock.service.text.tokenizer import TokenizerPool


@pytest.fixture
def make_builder(byte_tokenizer):
    pools = []

    def make(max_model_len=4096, max_sequence_tokens=None, tokenizer=None, defaults=None, **more):
        tokenizer = tokenizer or byte_tokenizer
        pool = TokenizerPool(tokenizer, block_size=16, max_prompt_tokens=max_model_len - 1)
        pools.append(pool)
        validator = Validator(ModelLimits(tokenizer.vocab_size, max_model_len))
        return RequestBuilder(
            validator,
            pool,
            "bytes",
            max_sequence_tokens or max_model_len,
            max_retain_s=600.0,
            grammars=GrammarChecks(tokenizer),
            defaults=defaults,
            **more,
        )

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def convert(make_builder):
    """Checks a start and turns it into a request."""

    async def convert(start, builder=None, tenant="default", answer=ResponseMode.STREAMED, context=None, **origin):
        builder = builder or make_builder()
        builder.check(start)
        whose = Origin("id", tenant, arrival=time.monotonic(), **origin)
        return (await builder.prepare(start, whose, lambda event: None, answer, context)).request

    return convert
