"""POST /v1/classify, /v1/score and /v1/rerank, as in vLLM; the last also with the basic fields of Cohere's and Jina's
APIs."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from penstock.clients.gateway.schemas.common import TRUNCATE, Items, Lenient, NumKept, Prompts, QueuedBody, UInt32, few
from penstock.clients.gateway.schemas.embeddings import EmbeddingsUsage

_MAX_INPUTS = 2048
"""The contract's limit."""


class DocumentText(Lenient):
    """A document as an object. Its other fields are ignored."""

    text: str


def _document_kind(given: Any) -> str:
    return "Object" if isinstance(given, dict | DocumentText) else "Text"


def _texts_kind(given: Any) -> str:
    return "Texts" if isinstance(given, list) else "Text"


Document = Annotated[
    Annotated[str, Tag("Text")] | Annotated[DocumentText, Tag("Object")], Discriminator(_document_kind)
]
Documents = Annotated[Items[Document], few(_MAX_INPUTS, "documents"), Field(min_length=1)]
Texts = Annotated[
    Annotated[str, Tag("Text")] | Annotated[Items[str], few(_MAX_INPUTS, "texts"), Field(min_length=1), Tag("Texts")],
    Discriminator(_texts_kind),
]


class PooledBody(QueuedBody):
    """Fields of all requests to the classification head."""

    use_activation: bool | None = None
    """Whether the model's activation function is applied, usually sigmoid or softmax. Without it, values are logits.
    Default: true."""
    activation: bool | None = Field(None, description="The older name of use_activation.")
    truncate_prompt_tokens: NumKept | None = Field(None, description=TRUNCATE)
    truncation_side: Literal["left", "right"] | None = None
    """The side that truncate_prompt_tokens cuts: right keeps the first tokens. Default: right."""

    @property
    def activates(self) -> bool | None:
        """Whether the activation function is applied; None: the default."""
        return self.activation if self.use_activation is None else self.use_activation


class ClassifyRequest(PooledBody):
    """A request to classify texts."""

    input: Annotated[Prompts, few(_MAX_INPUTS, "inputs"), Field(min_length=1)]
    """A text, a list of token ids, or a list of at most 2,048 of either."""
    add_special_tokens: Literal[True] | None = None
    """Only true: the tokenizer always adds its special tokens to a text."""


class PairsBody(PooledBody):
    """Fields of requests with pairs of a query and a document."""

    instruction: str | None = None
    """An instruction to the model. Only with a chat template for pairs, which shows it as the role system."""


class ScoreRequest(PairsBody):
    """A request to score pairs of texts: one text with each of several, or each with its counterpart. Set text_1 and
    text_2, or queries and documents, which mean the same."""

    text_1: Texts | None = Field(None, description="A text, or as many as in text_2: the queries.")
    text_2: Texts | None = Field(None, description="A text, or a list of at most 2,048: the documents.")
    queries: Texts | None = Field(None, description="The same as text_1.")
    documents: Texts | None = Field(None, description="The same as text_2.")


class RerankRequest(PairsBody):
    """A request to sort documents by their relevance to a query."""

    query: str
    documents: Documents
    """1 to 2,048 documents: texts, or objects with text."""
    top_n: UInt32 | None = None
    """The maximum number of documents in the answer; 0: all of them. Default: all."""
    return_documents: bool | None = Field(None, description="Whether results have the documents. Default: true.")


class ClassifyResult(BaseModel):
    """The result for one input."""

    index: int = Field(description="The index of the input.")
    label: str = Field(description="The name of the label with the highest value.")
    probs: list[float] = Field(
        description="A value for each label: its probability, unless the model or use_activation turns the activation "
        "function off."
    )
    num_classes: int


class ClassifyAnswer(BaseModel):
    """The results, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int = Field(description="The Unix timestamp, in seconds, of when the response was created.")
    model: str
    data: list[ClassifyResult]
    usage: EmbeddingsUsage


class ScoreResult(BaseModel):
    """The score of one pair."""

    index: int = Field(description="The index of the pair.")
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(BaseModel):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int = Field(description="The Unix timestamp, in seconds, of when the response was created.")
    model: str
    data: list[ScoreResult]
    usage: EmbeddingsUsage


class RerankResult(BaseModel):
    """One document."""

    index: int = Field(description="The index of the document in the request.")
    relevance_score: float
    document: DocumentText | None = Field(None, description="The document, unless return_documents is false.")


class RerankAnswer(BaseModel):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingsUsage
