"""POST /v1/embeddings."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from penstock.clients.gateway.schemas.common import TRUNCATE, Body, NumKept, Prompts, UInt32, few

_MAX_INPUTS = 2048
"""The contract's limit."""


class EmbeddingsRequest(Body):
    """Embed texts."""

    input: Annotated[Prompts, few(_MAX_INPUTS, "inputs"), Field(min_length=1)] = Field(
        description="A text, token ids, or a list of either: at most 2,048."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 has the vector's 32-bit floats, little-endian. Default: float."
    )
    dimensions: UInt32 | None = Field(
        None, description="Only so many values of each vector, for models that were trained for it. Default: all."
    )
    normalize: bool | None = Field(None, description="Whether each vector has length 1. Default: the service's: true.")
    truncate_prompt_tokens: NumKept | None = Field(None, description=TRUNCATE)
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which side truncate_prompt_tokens cuts: right keeps the first tokens. Default: right."
    )
    add_special_tokens: Literal[True] | None = Field(None, description="A text gets the tokenizer's own tokens.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower runs first, where the service schedules by priority."
    )
    request_id: str | None = Field(None, description="The caller's own id, for the service's logs.")


class EmbeddingData(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Of its input.")
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    """Tokens used."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """A vector for each input, in their order."""

    object: Literal["list"] = "list"
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingsUsage
