"""What a case of the list says, and what its answer is read as.

The model is the demo: 4,096 tokens, 4095 ends an answer.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = ("chat",), ("completions",), ("responses",), ("embeddings",)
GENERATION = CHAT + COMPLETIONS + RESPONSES
EVERYWHERE = GENERATION + EMBEDDINGS
"""Endpoints that a case holds for."""
END = 4095
WORD, OTHER_WORD = 1000, 500
"""Of the demo's tokens " first" and " ver"."""
ALWAYS = {str(WORD): 100}
"""A bias that leaves one token to choose."""
NUM_TOKENS = 12
QUESTION = "What is a kernel?"
UNKNOWN = "temprature"
"""A typing error."""
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS, "seed": 7},
    "completions": {"prompt": "The kernel is", "max_tokens": NUM_TOKENS, "seed": 7},
    "responses": {"input": QUESTION, "max_tokens": NUM_TOKENS, "seed": 7},
    "embeddings": {"input": QUESTION},
}
"""What a case's fields are added to. ``max_tokens`` is sent by its endpoint's name."""


@dataclass
class Choice:
    """One choice, put together from however many parts it came in."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Names and arguments."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[str] = dataclasses.field(default_factory=list)
    """As the logprobs name them."""
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top: list[list[tuple[str, float]]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)


@dataclass
class Answer:
    """An answer, without what no two of them share."""

    model: str = ""
    choices: list[Choice] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Any] = dataclasses.field(default_factory=list)
    vectors: list[list[float]] = dataclasses.field(default_factory=list)
    request_id: str = dataclasses.field(default="", compare=False)
    tells_stop: bool = True
    """Whether an answer of this kind says what stopped it."""
    raw: Any = dataclasses.field(default=None, compare=False)
    """As the package has it: the whole, or what ends a stream."""

    @property
    def text(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.text

    @property
    def end(self) -> tuple[str | None, str | int | None]:
        """How the only choice ended, and by what."""
        (choice,) = self.choices
        return choice.finish_reason, choice.stop_reason


Ask = Callable[..., Answer]
"""Sends the case's request again, with these fields changed."""
Holds = Callable[[Answer, Ask], None]


class Support(Enum):
    """What becomes of a field."""

    DONE = "yes"
    IGNORED = "accepted, changes nothing"
    REFUSED = "refused with 400"


@dataclass(frozen=True)
class Case:
    """One thing that a field does."""

    field: str
    what: str
    """For the reader of the documentation."""
    body: dict[str, Any]
    holds: Holds | None = None
    """None where an answer, or the refusal, says it all."""
    support: Support = Support.DONE
    endpoints: tuple[str, ...] = CHAT + COMPLETIONS
    status: int = 400
    """Of a refusal."""
    service: str = "demo"
    """Or "scripted", whose model says what it is told to."""
    streams: bool = True
    whole: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is changed where the answer is not streamed."""

    @property
    def name(self) -> str:
        """Of its test."""
        return f"{self.field}: {self.what}"
