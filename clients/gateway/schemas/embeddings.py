"""POST /v1/embeddings."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from penstock.clients.gateway.schemas.common import TRUNCATE, NumKept, Prompts, QueuedBody, UInt32, few

_MAX_INPUTS = 2048
"""The contract's limit."""


class EmbeddingsRequest(QueuedBody):
    """A request to embed texts."""

    input: Annotated[Prompts, few(_MAX_INPUTS, "inputs"), Field(min_length=1)]
    """A text, a list of token ids, or a list of at most 2,048 of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """The format of the vectors. base64 encodes 32-bit floats, little-endian. Default: float."""
    dimensions: UInt32 | None = None
    """The number of values in each vector; the rest are cut. For models that were trained for it. Default: all."""
    normalize: bool | None = None
    """Whether to scale each vector to length 1. Default: as in the model's modules.json, else true."""
    truncate_prompt_tokens: NumKept | None = Field(None, description=TRUNCATE)
    truncation_side: Literal["left", "right"] | None = None
    """The side of an input that truncate_prompt_tokens cuts: right keeps the first tokens. Default: right."""
    add_special_tokens: Literal[True] | None = None
    """Only true: the tokenizer always adds its special tokens to a text."""


class EmbeddingData(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="The index of the input.")
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    """The number of tokens used."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """A vector for each input, in the order of the inputs."""

    object: Literal["list"] = "list"
    id: str
    created: int = Field(description="The Unix timestamp, in seconds, of when the response was created.")
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingsUsage
