"""The preparation of a request: its time limit, its end if it ends before the engine has it, changes until then, and
the tokens of its prediction."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import penstock.v1 as pb
from penstock.scheduler.request import (
    Change,
    EngineFinishReason,
    Request,
    RequestFinished,
    RequestTimings,
    TokenUsage,
)
from penstock.service.config.limits import Validator
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.prompt_limit import TextLimit
from penstock.service.text.tokenizer import Tokenizer


@asynccontextmanager
async def preparation_limit(deadline: float | None, aim: str) -> AsyncIterator[asyncio.Timeout]:
    """Ends the preparation of a request at its ``deadline`` by ``time.monotonic()``. Raises ServiceError DEADLINE."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()) as limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise ServiceError(Reason.DEADLINE, f"the deadline passed before {aim}") from None


def unqueued_end(
    reason: EngineFinishReason, request: Request | None, arrival: float, message: str = ""
) -> RequestFinished:
    """Returns the end of a request that the engine does not have. ``arrival`` is by ``time.monotonic()``."""
    usage = TokenUsage(prompt_tokens=0 if request is None else request.num_prompt_tokens)
    total_us = round((time.monotonic() - arrival) * 1e6)
    return RequestFinished(reason, usage, RequestTimings(total_us=total_us), message)


def requested_change(update: pb.GenerationUpdate) -> Change:
    """Returns the change that an update requests. The deadline counts from now."""
    has = update.HasField
    return Change(
        priority=update.priority if has("priority") else None,
        deadline=time.monotonic() + update.timeout_ms / 1000 if has("timeout_ms") else None,
        max_tokens=update.max_tokens if has("max_tokens") else None,
    )


def predicted_ids(prediction: pb.Prediction, tokenizer: Tokenizer, validator: Validator) -> list[int]:
    """Returns the tokens of a prediction that has passed ``validator``, at most as many as the model's context. Tokens
    of a text that the model lacks are left out, since no output has them. Raises ServiceError."""
    if prediction.WhichOneof("content") == "text":
        token_ids = tokenizer.encode_after(prediction.text, TextLimit(field="prediction.text"))
        token_ids = [token_id for token_id in token_ids if token_id < tokenizer.vocab_size]
    else:
        token_ids = list(prediction.token_ids.ids)
        validator.check_ids(token_ids, "prediction.token_ids.ids")
    return token_ids[: validator.limits.max_model_len]
