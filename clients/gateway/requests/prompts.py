"""Reads the prompts of a completion, with their text and tokens if the answer contains them."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import penstock.v1 as pb
from penstock.clients.gateway.errors import invalid, renaming
from penstock.clients.gateway.field_names import Names, caller_name
from penstock.clients.gateway.requests.truncation import fill_prompt_truncation, truncated
from penstock.clients.gateway.schemas.common import is_single
from penstock.clients.gateway.schemas.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.v1 import DetokenizeRequest, TokenizeRequest

_MAX_CHAR_BYTES = 4
ID_BYTES = 8
"""The approximate size of a token's id in memory."""
_MAX_ADDED = 16
"""An upper bound of the tokens that a tokenizer adds to a text."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt. Has the text or the tokens that the caller sent, and the other if it was needed."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    text_offsets: Sequence[int] = ()
    """The offset of each token in the text, in characters, if the answer contains it."""

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory."""
        return len(self.text or "") + ID_BYTES * (len(self.token_ids or ()) + len(self.text_offsets))

    def put_into(self, start: pb.GenerationStart) -> None:
        """Sets the prompt; prefers tokens to text, since the answer refers to them."""
        if self.token_ids is not None:
            start.token_ids.ids.extend(self.token_ids)
        else:
            assert self.text is not None
            start.text = self.text


async def read_prompts(body: CompletionRequest, caller: UpstreamCaller) -> list[ParsedPrompt]:
    """Reads the prompts of a request. Raises GatewayError."""
    prompts = _listed(body)
    needs_ids = (
        body.echo or body.return_token_ids or body.prompt_logprobs is not None or body.add_special_tokens is False
    )
    checks_room = body.max_tokens is None and body.truncate_prompt_tokens is None
    is_alone, context = is_single(body.prompt), caller.model.max_model_len

    async def complete(at: int, prompt: ParsedPrompt) -> ParsedPrompt:
        if not needs_ids and not (checks_room and _may_lack_room(prompt, context)):
            return prompt
        found = await _complete(prompt, body, caller, prompt_names(is_alone, at))
        is_too_long = len(found.token_ids or ()) >= context
        return prompt if is_too_long and not needs_ids else found  # the service's error refers to what was sent

    completed = await asyncio.gather(*itertools.starmap(complete, enumerate(prompts)))
    if checks_room:
        for at, prompt in enumerate(completed):
            _check_room(prompt, context, _prompt_name(is_alone, at))
    return completed


def prompt_names(is_alone: bool, index: int) -> Names:
    """The caller's names for the contract's fields that hold the prompt at ``index``."""
    name = _prompt_name(is_alone, index)
    return ((r"token_ids(\.ids)?", name), (r"text", name))


def _prompt_name(is_alone: bool, index: int) -> str:
    return "prompt" if is_alone else f"prompt[{index}]"


def _may_lack_room(prompt: ParsedPrompt, context: int) -> bool:
    """Whether a text may leave too few tokens of the context for the default of max_tokens."""
    return prompt.text is not None and _MAX_CHAR_BYTES * len(prompt.text) + _MAX_ADDED + DEFAULT_MAX_TOKENS > context


def _check_room(prompt: ParsedPrompt, context: int, param: str) -> None:
    """Checks that the default limit fits: if it were cut, an answer of one token would look like the model's choice."""
    left = context - len(prompt.token_ids or ())
    if 0 < left < DEFAULT_MAX_TOKENS:
        problem = (
            f"leaves room for {left:,} more in the model's context of {context:,} tokens, and max_tokens is "
            f"{DEFAULT_MAX_TOKENS} by default; send a shorter prompt, or max_tokens"
        )
        raise invalid(param, problem, code="context_length_exceeded")


def _listed(body: CompletionRequest) -> list[ParsedPrompt]:
    given = body.prompt
    if isinstance(given, str):
        return [ParsedPrompt(text=given)]
    if not given:
        raise invalid("prompt", "is empty")
    if isinstance(given[0], int):
        return [ParsedPrompt(token_ids=given)]
    return [ParsedPrompt(text=each) if isinstance(each, str) else ParsedPrompt(token_ids=each) for each in given]


async def _complete(
    prompt: ParsedPrompt, body: CompletionRequest, caller: UpstreamCaller, names: Names
) -> ParsedPrompt:
    tokenizer = caller.stubs.tokenizer
    shows_places = bool(body.echo) and body.logprobs is not None
    shows_special_tokens = body.skip_special_tokens is False
    with renaming(partial(caller_name, names=names)):
        if prompt.token_ids is None:
            assert prompt.text is not None
            adds = body.add_special_tokens is not False
            wanted = TokenizeRequest(text=prompt.text, add_special_tokens=adds, include_text_offsets=shows_places)
            fill_prompt_truncation(wanted, body, caller)
            tokens = await caller.call(tokenizer.Tokenize, wanted)
            if not (body.echo and body.truncate_prompt_tokens):
                return ParsedPrompt(prompt.text, tokens.token_ids, tokens.text_offsets)
            prompt = ParsedPrompt(token_ids=tokens.token_ids)  # only the text of the kept tokens remains
            shows_special_tokens = False
        assert prompt.token_ids is not None
        token_ids = truncated(prompt.token_ids, body, caller)
        if not body.echo:
            return ParsedPrompt(token_ids=token_ids)
        request = DetokenizeRequest(
            token_ids=token_ids, include_special_tokens=shows_special_tokens, include_text_offsets=shows_places
        )
        response = await caller.call(tokenizer.Detokenize, request)
        return ParsedPrompt(response.text, token_ids, response.text_offsets)
