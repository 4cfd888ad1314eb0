"""POST /v1/responses: what it takes, as far as that needs no memory of earlier responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.schemas_common import FEW_ENTRIES, Items, SamplingBody, UInt32

_LENIENT = ConfigDict(strict=True, extra="ignore")
_KNOWN = ConfigDict(strict=True, extra="forbid")


class TextPart(BaseModel):
    """Text of a message, of either side."""

    model_config = _LENIENT

    type: Literal["input_text", "output_text", "text"]
    text: str


_TEXTS = frozenset({"input_text", "output_text", "text"})


class RefusalPart(BaseModel):
    """An answer's refusal, as other services give it."""

    model_config = _LENIENT

    type: Literal["refusal"]
    refusal: str


def _part_kind(part: Any) -> str:
    kind = str(part.get("type") if isinstance(part, dict) else getattr(part, "type", None))
    return "Text" if kind in _TEXTS else kind.title()


ContentPart = Annotated[
    # The tags are no names of fields, so that an error's path leaves them out.
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")],
    Discriminator(
        _part_kind,
        custom_error_type="content_part",
        custom_error_message="must be text: the model reads nothing else",
    ),
]


class MessageItem(BaseModel):
    """Something said."""

    model_config = _LENIENT

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentPart]


class CallItem(BaseModel):
    """A call that an answer made."""

    model_config = _LENIENT

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(BaseModel):
    """What a call gave."""

    model_config = _LENIENT

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[TextPart]


class ReasoningItem(BaseModel):
    """Reasoning of an earlier answer: passed over, as chat templates drop it."""

    model_config = _LENIENT

    type: Literal["reasoning"]


def _kind(item: Any) -> str:
    """Of an item: a message may leave it out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message").title()


InputItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Function_Call")]
    | Annotated[CallOutputItem, Tag("Function_Call_Output")]
    | Annotated[ReasoningItem, Tag("Reasoning")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message="no item that this service takes; its type may be message, function_call, "
        "function_call_output or reasoning",
    ),
]


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = _LENIENT

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="True holds calls under `auto` to the schema too, in the formats hermes and mistral."
    )


InputItems = Annotated[list[InputItem], Field(max_length=4096, fail_fast=True)]
FunctionTools = Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)]
"""At most as many as the contract takes messages and tools: each is an object here, many times its size in a body."""


class TextFormat(BaseModel):
    """What form the answer must have."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    type: str = Field(description="text, json_object or json_schema.")
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="Of json_schema.")


class TextConfig(BaseModel):
    """About the answer's text."""

    model_config = _KNOWN

    format: TextFormat | None = Field(None, description="What form the answer must have.")
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(BaseModel):
    """About the model's reasoning."""

    model_config = _KNOWN

    effort: str | None = Field(None, description="A variable of the chat template, where it has one.")
    summary: Literal["auto"] | None = Field(None, description="Reasoning is returned as it was written.")
    generate_summary: Literal["auto"] | None = Field(None, description="The older name of summary.")
    context: Literal["auto"] | None = Field(None, description="The template decides what is shown of earlier turns.")
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(BaseModel):
    """What a streamed answer tells besides."""

    model_config = _KNOWN

    include_obfuscation: bool | None = Field(None, description="Passed over: there is no padding to be left out.")


_NO_STORE = "nothing is stored here"
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "background": ((None, False), f"{_NO_STORE} to be asked for later; stream the answer instead"),
    "context_management": ((None, []), "is not supported; send the input that the model is to see"),
    "conversation": ((None,), f"{_NO_STORE}; send the whole conversation as input"),
    "moderation": ((None,), "is not supported"),
    "previous_response_id": ((None,), f"{_NO_STORE}; send the whole conversation as input"),
    "prompt": ((None,), f"{_NO_STORE}; send instructions and input"),
    "store": ((None, False), f"{_NO_STORE}; leave it out, or send false"),
    "truncation": ((None, "disabled"), "input that is too long is refused; shorten it, and leave this out"),
}
"""Fields that need a memory, or more than a model: the values that ask for nothing, and what to do instead."""
_IGNORED = frozenset({"max_tool_calls", "prompt_cache_options"})
"""Besides those of every endpoint: they are about tools and bills of OpenAI's own."""


class ResponsesRequest(SamplingBody):
    """Answer a conversation, in OpenAI's newer form. Nothing is stored: each request brings its whole input."""

    input: str | InputItems = Field(min_length=1, description="A question, or a conversation in order.")
    instructions: str | None = Field(None, description="What the model is told before it.")
    max_output_tokens: Annotated[UInt32, Field(ge=1)] | None = Field(
        None, description="The most tokens. Default: all that the context leaves."
    )
    stream: bool | None = Field(None, description="Whether the answer comes as server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    tools: FunctionTools | None = Field(None, description="What the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='"auto", "none", "required" or a function. Default: "auto" with tools.'
    )
    parallel_tool_calls: bool | None = Field(None, description="False keeps an answer's first call alone.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Log-probabilities of the text. Reasoning is never encrypted: it is returned as it is."
    )
    top_logprobs: UInt32 | None = Field(None, description="Log-probabilities with so many alternatives, to 20.")
    metadata: Annotated[dict[str, str], FEW_ENTRIES] | None = Field(None, description="Returned as it is.")
    user: str | None = Field(None, description="Returned as it is.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")

    @model_validator(mode="before")
    @classmethod
    def _needs_no_memory(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (asks_for_nothing, remedy) in _REFUSED.items():
            if body.get(name) not in asks_for_nothing:
                raise invalid(name, remedy, code="unsupported_parameter")
        return {name: value for name, value in body.items() if name not in _REFUSED and name not in _IGNORED}
