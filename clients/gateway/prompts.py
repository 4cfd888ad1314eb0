"""The prompts of a completion, with their text and tokens where the answer shows them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.errors import from_failure, invalid
from penstock.clients.gateway.field_names import Names, caller_name
from penstock.clients.gateway.schemas_completions import CompletionRequest
from penstock.clients.gateway.service_link import Caller
from penstock.v1 import generation_pb2 as pb
from penstock.v1.tokenizer_pb2 import DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. Text or tokens is what the caller sent; the other is there if it was needed."""

    text: str | None = None
    token_ids: Sequence[int] | None = None

    def put_into(self, start: pb.Start) -> None:
        """Tokens go before text: they are what the answer speaks of."""
        if self.token_ids is not None:
            start.token_ids.ids.extend(self.token_ids)
        else:
            assert self.text is not None
            start.text = self.text


async def read_prompts(body: CompletionRequest, caller: Caller) -> list[Prompt]:
    """All of a request. Raises GatewayError."""
    prompts = _listed(body)
    needs_ids = (
        body.echo or body.return_token_ids or body.prompt_logprobs is not None or body.add_special_tokens is False
    )
    if not needs_ids:
        return prompts
    completing = (_complete(prompt, body, caller, prompt_names(body, at)) for at, prompt in enumerate(prompts))
    return list(await asyncio.gather(*completing))


def prompt_names(body: CompletionRequest, index: int) -> Names:
    """The caller's names of the contract's fields that hold the prompt at ``index``."""
    is_alone = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    name = "prompt" if is_alone else f"prompt[{index}]"
    return ((r"token_ids(\.ids)?", name), (r"text", name))


def _listed(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not given:
        raise invalid("prompt", "is empty")
    if isinstance(given[0], int):
        return [Prompt(token_ids=given)]
    return [Prompt(text=each) if isinstance(each, str) else Prompt(token_ids=each) for each in given]


async def _complete(prompt: Prompt, body: CompletionRequest, caller: Caller, names: Names) -> Prompt:
    tokenizer = caller.stubs.tokenizer
    try:
        if prompt.token_ids is None:
            assert prompt.text is not None
            adds = body.add_special_tokens is not False
            tokens = await caller.call(tokenizer.Tokenize, TokenizeRequest(text=prompt.text, add_special_tokens=adds))
            return Prompt(prompt.text, tokens.token_ids)
        if not body.echo:
            return prompt
        shows_specials = body.skip_special_tokens is False
        request = DetokenizeRequest(token_ids=prompt.token_ids, include_special_tokens=shows_specials)
        return Prompt((await caller.call(tokenizer.Detokenize, request)).text, prompt.token_ids)
    except RequestFailed as failure:
        raise from_failure(failure, partial(caller_name, names=names)) from None
