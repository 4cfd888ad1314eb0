"""POST /v1/completions."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from penstock.clients.gateway.schemas.common import (
    GenerationBody,
    PromptLogprobs,
    Prompts,
    TokenLimit,
    UInt32,
    UsageInfo,
    few,
)

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
"""The limit of prompts in one HTTP request: each is a separate request to the service."""


class CompletionRequest(GenerationBody):
    """Continue a text."""

    prompt: Annotated[Prompts, few(MAX_PROMPTS, "prompts")] = Field(
        description="A text, token ids, or a list of either; each prompt has its choices, in order."
    )
    max_tokens: TokenLimit | None = Field(
        None,
        description="The most tokens of each choice; more than the context leaves is cut. 0 only with echo: then "
        f"nothing is generated. Default: {DEFAULT_MAX_TOKENS}.",
    )
    logprobs: UInt32 | None = Field(
        None, description="Log-probabilities of tokens and of this many alternatives, at most 20."
    )
    echo: bool | None = Field(None, description="Puts the prompt before the output; with logprobs, its own too.")
    best_of: UInt32 | None = Field(None, description="Only as many as n: all that is made is returned.")
    suffix: str | None = Field(None, description="Not supported: models here write on, not in between.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer puts its own tokens around a text, such as a beginning. Default: true."
    )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens, as parallel lists."""

    text_offset: list[int] = Field(description="Where each token begins in the text, in characters.")
    token_logprobs: list[float | None]
    tokens: list[str] = Field(description='A token that is no whole character is "bytes:\\\\xe2\\\\x80".')
    top_logprobs: list[dict[str, float] | None] = Field(description="The alternatives of each token.")


class CompletionChoice(BaseModel):
    """One answer, or what a chunk adds to it."""

    index: int = Field(description="Of the prompt, times n, plus which of its choices.")
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = Field(None, description="The stop string or stop token that ended it.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids; once for each choice.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With prompt_logprobs.")


class CompletionResponse(BaseModel):
    """The answer; streamed, each event has one with what is new."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
