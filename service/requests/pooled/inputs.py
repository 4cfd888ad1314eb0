"""Checks and tokenizes inputs that each need one vector, for embeddings, classes and scores, and builds the scheduler's
request. Knows neither calls nor the engine.
"""

from collections.abc import Callable, Iterator, Sequence

import penstock.v1 as pb
from penstock.scheduler.plan import Pooling, SamplingParams
from penstock.scheduler.request import Event, Prompt, Request
from penstock.service.config.field_rules import Limit
from penstock.service.config.limits import Validator
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.requests.adapters import AdapterRegistry
from penstock.service.requests.preparation import Origin
from penstock.service.text.detokenizer import IdsOnly
from penstock.service.text.prompt_limit import PromptLimit
from penstock.service.text.tokenizer import TokenizerPool
from penstock.service.text.truncation import Truncation

MAX_VALUES = 900_000
"""The maximum number of values in a whole response, which keeps it below the 4 MiB default limit of gRPC's clients."""
MAX_TOKENS = 1 << 20
"""The maximum number of tokens in all inputs of a request."""

PooledMessage = pb.EmbedRequest | pb.ClassifyRequest | pb.ScoreRequest
Encoded = tuple[list[int], PromptLimit]
"""The tokens of an input, and the limit that they must keep."""


class PooledInputs:
    """Handles the inputs of requests to one served model."""

    def __init__(
        self, validator: Validator, pool: TokenizerPool, model_name: str, adapters: AdapterRegistry | None = None
    ) -> None:
        """``adapters`` are those that requests may name as their model."""
        self.validator = validator
        self.pool = pool
        self._adapters = adapters or AdapterRegistry(model_name)

    def check(self, inputs: Sequence[pb.EmbedInput], truncates: bool) -> None:
        """Makes all checks of inputs that are possible before they are tokenized. Raises ServiceError."""
        num_bytes = 0
        for index, item in enumerate(inputs):
            kind = item.WhichOneof("input")
            if kind is None:
                raise invalid(f"inputs[{index}].input", "is required; set text or token_ids")
            if kind == "text":
                num_bytes += utf8_bytes(item.text)
                if not truncates:
                    self.pool.check_text(item.text, f"inputs[{index}].text", room_for_output=0)
            elif not truncates:
                self.validator.check_num_ids(item.token_ids.ids, f"inputs[{index}].token_ids.ids", Limit.CONTEXT)
        if num_bytes > MAX_TEXT_BYTES:
            raise invalid("inputs", f"at most {MAX_TEXT_BYTES:,} bytes of text in total; they have {num_bytes:,}")

    def encode(self, inputs: Sequence[pb.EmbedInput], truncation: Truncation | None) -> Iterator[Encoded]:
        """Yields the tokens of each input. Raises ServiceError."""
        for index, item in enumerate(inputs):
            field = f"inputs[{index}]"
            if item.WhichOneof("input") == "text":
                limit = self.pool.limit(f"{field}.text", room_for_output=0)
                token_ids = self.pool.tokenizer.encode(item.text, True, truncation, limit)
            else:
                limit = self.pool.limit(f"{field}.token_ids.ids", room_for_output=0)
                token_ids = list(item.token_ids.ids)
                self.validator.check_ids(token_ids, limit.field)
                token_ids = token_ids if truncation is None else truncation.cut(token_ids)
            yield token_ids, limit

    def truncation(self, request: PooledMessage) -> Truncation | None:
        """Returns the truncation that a request sets, or None. Raises ServiceError."""
        return Truncation.of(request, self.validator.limits.max_model_len, keeps_first=True)

    def make(
        self,
        encoded: Iterator[Encoded],
        request: PooledMessage,
        origin: Origin,
        sink: Callable[[Event], None],
        pooling: Pooling,
        field: str = "inputs",
    ) -> Request:
        """Returns the scheduler's request for inputs, at least one; tokenizes them. ``field`` is the request's field
        with the inputs. Slow, so it is for the tokenizer's threads. Raises ServiceError."""
        adapter, salt = self._adapters.resolve(request.model, origin.tenant)
        prompts: list[Prompt] = []
        num_tokens = 0
        for token_ids, limit in encoded:
            prompts.append(self.pool.prompt(token_ids, salt, limit))
            num_tokens += len(token_ids)
            if num_tokens > MAX_TOKENS:
                raise too_expensive(field, "the total number of tokens", num_tokens, MAX_TOKENS)
        first, *others = prompts
        return Request(
            request_id=origin.request_id,
            prompt_token_ids=first.token_ids,
            block_hashes=first.block_hashes,
            sampling=SamplingParams(),
            max_tokens=0,
            sink=sink,
            make_text=IdsOnly,
            n=len(prompts),
            tenant=origin.tenant,
            priority=request.priority,
            deadline=origin.deadline,
            client_request_id=request.client_request_id,
            arrival=origin.arrival,
            hash_salt=salt,
            adapter=adapter,
            pooling=pooling,
            more_prompts=others,
        )


def check_num_values(num_inputs: int, num_each: int, what: str) -> None:
    """Refuses a request whose response would be too large. ``what`` names the numbers. Raises ServiceError."""
    if num_inputs * num_each > MAX_VALUES:
        raise too_expensive("inputs", what, num_inputs * num_each, MAX_VALUES)


def too_expensive(field: str, what: str, value: int, limit: int) -> ServiceError:
    """Returns the error for a request that exceeds a limit in total."""
    return ServiceError(
        Reason.TOO_EXPENSIVE,
        f"{field}: {what} must be at most {limit:,}; it is {value:,} or more; send the {field} in several requests",
        field=field,
    )
