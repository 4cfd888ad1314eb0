"""POST /v1/completions."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from penstock.clients.gateway.schemas.common import (
    GenerationBody,
    PromptLogprobs,
    Prompts,
    ResponseFormat,
    UInt32,
    UsageInfo,
    few,
)

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
"""The limit on prompts in one HTTP request: each is a separate request to the service."""


class CompletionRequest(GenerationBody):
    """A request to continue a text."""

    prompt: Annotated[Prompts, few(MAX_PROMPTS, "prompts")]
    """A text, token ids, or a list of either. The choices are returned in the order of the prompts."""
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="The maximum number of tokens in each choice. Larger values are reduced to the room left in the "
        f"context. 0 generates nothing and needs echo. Default: {DEFAULT_MAX_TOKENS}.",
    )
    logprobs: UInt32 | None = None
    """Returns the log-probability of each token, with this many alternatives, at most 20."""
    echo: bool | None = None
    """Whether to return the prompt before the output, with its log-probabilities if requested."""
    best_of: UInt32 | None = Field(None, description="Must equal n: all choices that are generated are returned.")
    response_format: ResponseFormat | None = Field(None, description="The format that the output must have.")
    suffix: str | None = Field(None, description="Not supported: text can only be continued, not inserted.")
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text, such as a beginning-of-sequence token. Default: true."""


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens, as parallel lists."""

    text_offset: list[int] = Field(description="The position in the text at which each token begins, in characters.")
    token_logprobs: list[float | None]
    tokens: list[str] = Field(
        description='The tokens. A token that is not a whole character is written as "bytes:\\\\xe2\\\\x80".'
    )
    top_logprobs: list[dict[str, float] | None] = Field(description="The alternatives of each token.")


class CompletionChoice(BaseModel):
    """One of the choices, or the part of it that a chunk adds."""

    index: int = Field(description="The index of the prompt times n, plus the index among the prompt's choices.")
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = Field(None, description="The stop string or stop token that ended the output.")
    token_ids: list[int] | None = Field(None, description="The output's token ids. Only with return_token_ids.")
    prompt_token_ids: list[int] | None = Field(
        None, description="The prompt's token ids, once for each choice. Only with return_token_ids."
    )
    prompt_logprobs: PromptLogprobs | None = Field(
        None, description="The log-probabilities of the prompt's tokens. Only with prompt_logprobs."
    )


class CompletionResponse(BaseModel):
    """The response; in a stream, each event has one with the new part."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="The Unix timestamp, in seconds, of when the response was created.")
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
