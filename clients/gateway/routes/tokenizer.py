"""POST /tokenize and /detokenize."""

from functools import partial

from fastapi import APIRouter

import penstock.v1 as pb
from penstock.clients.gateway.errors import invalid, renaming
from penstock.clients.gateway.field_names import CHAT_NAMES, caller_name
from penstock.clients.gateway.requests.chat import rendered_ids
from penstock.clients.gateway.requests.sampling import check_model
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.tokenizer import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from penstock.clients.gateway.upstream.service_link import UpstreamCaller

_OF_A_CHAT = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
"""Fields that apply only to messages."""


def make_router() -> APIRouter:
    """Makes both routes."""
    router = APIRouter(route_class=CallerRoute, tags=["tokenizer"], responses=ERRORS)

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest, caller: CallerDep) -> TokenizeResponse:
        """Returns the tokens of a text or of a conversation, exactly as in a request."""
        check_model(request.model, caller)
        token_ids = await (_of_prompt(request, caller) if request.messages is None else _of_chat(request, caller))
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=caller.model.max_model_len,
            tokens=token_ids,
            token_strs=await _texts(token_ids, caller) if request.return_token_strs else None,
        )

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest, caller: CallerDep) -> DetokenizeResponse:
        """Returns the text of tokens, special ones included."""
        check_model(request.model, caller)
        message = pb.DetokenizeRequest(token_ids=request.tokens, include_special_tokens=True)
        with renaming(partial(caller_name, names=((r"token_ids", "tokens"),))):
            response = await caller.call(caller.stubs.tokenizer.Detokenize, message)
        return DetokenizeResponse(prompt=response.text)

    return router


async def _of_prompt(request: TokenizeRequest, caller: UpstreamCaller) -> list[int]:
    for name in _OF_A_CHAT:
        if getattr(request, name) is not None:
            raise invalid(name, "only with messages, not with prompt")
    assert request.prompt is not None
    message = pb.TokenizeRequest(text=request.prompt, add_special_tokens=request.add_special_tokens is not False)
    with renaming(partial(caller_name, names=((r"text", "prompt"),))):
        return list((await caller.call(caller.stubs.tokenizer.Tokenize, message)).token_ids)


async def _of_chat(request: TokenizeRequest, caller: UpstreamCaller) -> list[int]:
    if request.add_special_tokens:
        raise invalid("add_special_tokens", "not with messages: the chat template adds all special tokens")
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("continue_final_message", "not with add_generation_prompt: true")
    given = {name: getattr(request, name) for name in _OF_A_CHAT}
    chat = ChatRequest.model_construct(messages=request.messages, **given)
    return list(await rendered_ids(chat, caller, partial(caller_name, names=CHAT_NAMES)))


async def _texts(token_ids: list[int], caller: UpstreamCaller) -> list[str]:
    """Returns what each token adds to a text."""
    known = await caller.describe(set(token_ids))
    return [known[token_id].text.decode(errors="replace") for token_id in token_ids]
