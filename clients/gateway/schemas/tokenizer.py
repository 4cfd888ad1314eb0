"""POST /tokenize and /detokenize, as in vLLM."""

from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from penstock.clients.gateway.schemas.chat import Messages, Tools
from penstock.clients.gateway.schemas.common import Body, Ids


class TokenizeRequest(Body):
    """A request to tokenize a text or a conversation."""

    prompt: str | None = Field(None, description="The text. Set either this or messages.")
    messages: Messages | None = Field(None, description="The conversation. Set either this or prompt.")
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text. Default: true. For messages only false is allowed: the
    chat template adds all special tokens."""
    return_token_strs: bool | None = Field(None, description="Whether to return the text of each token too.")
    add_generation_prompt: bool | None = None
    """Whether to open a new assistant message at the end of the prompt. Default: true."""
    continue_final_message: bool | None = None
    """Whether to leave the last message open, which must be an assistant message. Excludes add_generation_prompt."""
    tools: Tools | None = Field(None, description="The tools that the model may call.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send one of prompt and messages")
        return self


class TokenizeResponse(BaseModel):
    """The tokens of the text or the conversation."""

    count: int
    max_model_len: int = Field(description="The maximum number of tokens of prompt and output together.")
    tokens: list[int]
    token_strs: list[str] | None = Field(
        None,
        description="The text of each token. Only with return_token_strs. Incomplete characters are shown as U+FFFD.",
    )


class DetokenizeRequest(Body):
    """A request to convert tokens to text."""

    tokens: Ids


class DetokenizeResponse(BaseModel):
    """The text, including special tokens."""

    prompt: str
