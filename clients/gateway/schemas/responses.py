"""POST /v1/responses: the part that needs no stored responses."""

from collections.abc import Mapping, Set as AbstractSet
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.schemas.common import FEW_ENTRIES, Items, SamplingBody, UInt32
from penstock.clients.gateway.schemas.response_tools import AnyTools

_NO_STORE = "nothing is stored here"
_LENIENT = ConfigDict(strict=True, extra="ignore")
_KNOWN = ConfigDict(strict=True, extra="forbid")


class TextPart(BaseModel):
    """Text of a message, of either role."""

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
    # Tags are not names of fields, so that error paths leave them out.
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")],
    Discriminator(
        _part_kind,
        custom_error_type="content_part",
        custom_error_message="must be text: the model reads nothing else",
    ),
]


class MessageItem(BaseModel):
    """A message."""

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
    namespace: str | None = None
    arguments: str


class CustomCallItem(BaseModel):
    """A call of a custom tool that an answer made."""

    model_config = _LENIENT

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(BaseModel):
    """The output of a call of either kind."""

    model_config = _LENIENT

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Items[ContentPart]


class AdditionalToolsItem(BaseModel):
    """Tools that were added during the conversation: the model gets them with the others."""

    model_config = _LENIENT

    type: Literal["additional_tools"]
    tools: AnyTools


class ReasoningText(BaseModel):
    """A part of reasoning, or of its summary."""

    model_config = _LENIENT

    text: str


class ReasoningItem(BaseModel):
    """Reasoning that precedes a message or a call of an earlier answer. The chat template decides what it shows."""

    model_config = _LENIENT

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[ReasoningText] | None = Field(None, description="Shown where there is no content.")


class ItemReference(BaseModel):
    """An item of an earlier answer, by its id: refused."""

    model_config = _LENIENT

    @model_validator(mode="before")
    @classmethod
    def _needs_a_memory(cls, item: Any) -> Any:
        raise ValueError(
            f"is an item_reference, and {_NO_STORE}; send the item itself, as clients do with store: false"
        )


def _kind(item: Any) -> str:
    """Returns the type of an item; a message may leave it out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    kind = str(kind or "message").title()
    return "Function_Call_Output" if kind == "Custom_Tool_Call_Output" else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Function_Call")]
    | Annotated[CustomCallItem, Tag("Custom_Tool_Call")]
    | Annotated[CallOutputItem, Tag("Function_Call_Output")]
    | Annotated[AdditionalToolsItem, Tag("Additional_Tools")]
    | Annotated[ItemReference, Tag("Item_Reference")]
    | Annotated[ReasoningItem, Tag("Reasoning")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message="not an item that this service takes; its type may be message, function_call, "
        "function_call_output, custom_tool_call, custom_tool_call_output, additional_tools or reasoning",
    ),
]


InputItems = Annotated[list[InputItem], Field(max_length=4096, fail_fast=True)]
"""At most the contract's limit of messages: a parsed item takes many times its size in a body."""


class TextFormat(BaseModel):
    """What form the answer must have."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    type: str = Field(description="text, json_object or json_schema.")
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="Of json_schema.")


class TextConfig(BaseModel):
    """About the answer's text."""

    model_config = _KNOWN

    format: TextFormat | None = Field(None, description="What form the answer must have.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="A variable of the chat template, where it has one."
    )


class ReasoningConfig(BaseModel):
    """About the model's reasoning."""

    model_config = _KNOWN

    effort: str | None = Field(None, description="A variable of the chat template, where it has one.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Ignored: reasoning is returned as it was written."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The older name of summary."
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None, description="Ignored: the chat template decides what is shown of earlier turns."
    )
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = _KNOWN

    include_obfuscation: bool | None = Field(None, description="Ignored: there is no padding.")


_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "background": ((None, False), f"{_NO_STORE} to be fetched later; stream the answer instead"),
    "context_management": ((None, []), "is not supported; send the input that the model is to see"),
    "conversation": ((None,), f"{_NO_STORE}; send the whole conversation as input"),
    "moderation": ((None,), "is not supported"),
    "previous_response_id": ((None,), f"{_NO_STORE}; send the whole conversation as input"),
    "prompt": ((None,), f"{_NO_STORE}; send instructions and input"),
    "truncation": ((None, "disabled"), "input that is too long is refused; shorten it, and leave this out"),
}
"""Fields that need stored responses, or more than a model: the values without effect, and the remedy."""
_IGNORED = frozenset({"client_metadata", "max_tool_calls", "prompt_cache_options"})
"""Fields that change nothing here, besides those of every endpoint: they concern OpenAI's own tools, bills and logs."""
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""OpenAI's values of ``include``. Only log-probabilities exist here."""


class ResponsesRequest(SamplingBody):
    """Answer a conversation, in OpenAI's newer form. Nothing is stored: each request brings its whole input."""

    input: str | InputItems = Field(min_length=1, description="A question, or a conversation in order.")
    instructions: str | None = Field(None, description="The system message before it.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The most tokens. Default: all that the context leaves."
    )
    stream: bool | None = Field(None, description="Whether the answer comes as server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    tools: AnyTools | None = Field(
        None, description="What the model may call: functions, custom tools, namespaces. Hosted tools are not offered."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description='"auto", "none", "required", one tool, or allowed_tools. Default: "auto" with tools.',
    )
    parallel_tool_calls: bool | None = Field(None, description="False keeps only an answer's first call.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Items[Includable] | None = Field(
        None,
        description="message.output_text.logprobs adds log-probabilities of the text. OpenAI's other values are "
        "accepted and add nothing: no hosted tool runs, and reasoning is returned unencrypted.",
    )
    top_logprobs: UInt32 | None = Field(None, description="Log-probabilities with this many alternatives, at most 20.")
    metadata: Annotated[dict[str, str], FEW_ENTRIES] | None = Field(None, description="Returned as it is.")
    user: str | None = Field(None, description="Returned as it is.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")

    @classmethod
    def other_fields(cls) -> AbstractSet[str]:
        """Returns the names of every endpoint, and of this one."""
        return super().other_fields() | _REFUSED.keys() | _IGNORED

    @model_validator(mode="before")
    @classmethod
    def _needs_no_memory(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (asks_for_nothing, remedy) in _REFUSED.items():
            if body.get(name) not in asks_for_nothing:
                raise invalid(name, remedy, code="unsupported_parameter")
        return {name: value for name, value in body.items() if name not in _REFUSED and name not in _IGNORED}


class InputTokens(BaseModel):
    """How long a prompt is."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
