"""POST /tokenize and /detokenize, as in vLLM."""

from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from penstock.clients.gateway.schemas.chat import Messages, Tools
from penstock.clients.gateway.schemas.common import Body, Ids


class TokenizeRequest(Body):
    """Tokenize a text or a conversation."""

    prompt: str | None = Field(None, description="The text. This or messages.")
    messages: Messages | None = Field(None, description="The conversation. This or prompt.")
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer puts its own tokens around a prompt. Default: true. A conversation's "
        "template has them all: there only false is possible.",
    )
    return_token_strs: bool | None = Field(None, description="Whether to return each token's text too.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether the assistant's turn is opened. Default: true."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message, the assistant's, stays open. Not with add_generation_prompt."
    )
    tools: Tools | None = Field(None, description="What the model may call.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send one of prompt and messages")
        return self


class TokenizeResponse(BaseModel):
    """Tokens."""

    count: int
    max_model_len: int = Field(description="The most tokens of prompt and output together.")
    tokens: list[int]
    token_strs: list[str] | None = Field(
        None, description="With return_token_strs. Bytes that are no whole character are shown as U+FFFD."
    )


class DetokenizeRequest(Body):
    """Convert tokens to text."""

    tokens: Ids


class DetokenizeResponse(BaseModel):
    """A text, special tokens included."""

    prompt: str
