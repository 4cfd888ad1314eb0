"""POST /v1/responses, and the items of its input."""

from collections.abc import Mapping, Set as AbstractSet
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.schemas.common import (
    FEW_ENTRIES,
    TEXT_PARTS,
    Items,
    Lenient,
    SamplingBody,
    Strict,
    UInt32,
    type_of,
)
from penstock.clients.gateway.schemas.response_tools import AnyTools

MAX_ITEMS = 4096
"""The contract's limit of messages: a parsed item takes many times its size in a body."""


class Item(Lenient):
    """What all items have."""

    id: str | None = None
    """The item's id. Items that are stored without one get one."""


class TextPart(Lenient):
    """A text in a message of any role."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Lenient):
    """A refusal in an answer of another service."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    # Tags are not field names, so error paths leave them out.
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")],
    Discriminator(
        lambda part: "Text" if type_of(part) in TEXT_PARTS else type_of(part).title(),
        custom_error_type="content_part",
        custom_error_message="must be text: other content is not supported",
    ),
]


class MessageItem(Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentPart]


class CallItem(Item):
    """A function call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Item):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(Item):
    """The output of a function call or a custom tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Items[ContentPart]


class AdditionalToolsItem(Item):
    """Tools that were added during the conversation. The model sees them with the others."""

    type: Literal["additional_tools"]
    tools: AnyTools


class ReasoningText(Lenient):
    """A part of the reasoning or of its summary."""

    text: str


class ReasoningItem(Item):
    """Reasoning before a message or a call in an earlier answer. The chat template may leave it out."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[ReasoningText] | None = Field(None, description="A summary, used if there is no content.")


class ItemReference(Lenient):
    """A reference to an item of an earlier answer by its id. Refused."""

    @model_validator(mode="before")
    @classmethod
    def _is_refused(cls, item: Any) -> Any:
        raise ValueError(
            "is an item_reference, which is not supported; send the item itself, as clients do with store: false, or "
            "continue its response by previous_response_id"
        )


def _kind(item: Any) -> str:
    """Returns the type of an item; it is optional for messages."""
    kind = (type_of(item) or "message").title()
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
        custom_error_message="not a supported item; the type must be message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, additional_tools or reasoning",
    ),
]


InputItems = Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]


class TextFormat(BaseModel):
    """The format that the answer must have."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    type: str = Field(description="text, json_object or json_schema.")
    json_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="With json_schema: the schema that the answer must match."
    )


class TextConfig(Strict):
    """Options for the answer's text."""

    format: TextFormat | None = Field(None, description="The format that the answer must have.")
    verbosity: Literal["low", "medium", "high"] | None = None
    """Passed to the chat template, if it has such a variable."""


class ReasoningConfig(Strict):
    """Options for the model's reasoning."""

    effort: str | None = Field(None, description="Passed to the chat template, if it has such a variable.")
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: the reasoning itself is returned, not a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of summary."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Ignored: the chat template decides which earlier reasoning the model sees."""
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Strict):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = Field(None, description="Ignored: events are never padded.")


_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "context_management": ((None, []), "is not supported; send the input that the model is to see"),
    "conversation": (
        (None,),
        "is not supported; continue a response by previous_response_id, or send the whole conversation as input",
    ),
    "moderation": ((None,), "is not supported"),
    "prompt": ((None,), "is not supported: prompts are not stored here; send instructions and input"),
    "truncation": ((None, "disabled"), "input that is too long is refused; shorten it, and leave this out"),
}
"""Fields that need other services: the values that have no effect, and the remedy."""
_IGNORED = frozenset({"client_metadata", "max_tool_calls", "prompt_cache_options"})
"""Further ignored fields, besides those of every endpoint: they are for OpenAI's own tools, billing and logs."""
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
"""OpenAI's values of ``include``. Only log-probabilities are supported."""


class ResponsesRequest(SamplingBody):
    """A request to answer a conversation, in OpenAI's newer API."""

    input: str | InputItems = Field(min_length=1, description="A question, or the items of a conversation in order.")
    instructions: str | None = Field(None, description="A system message to put before the whole conversation.")
    previous_response_id: str | None = None
    """The stored response that this one continues: its input and output, and those of the responses before it, come
    before this input. Its instructions and tools do not apply."""
    store: bool | None = None
    """Whether to store the response, to continue or fetch it later. Default: true."""
    background: bool | None = None
    """Whether to generate the response in the background, so that it goes on when the caller disconnects."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of output tokens. Default: as many as fit in the context."""
    stream: bool | None = Field(None, description="Whether to stream the response as server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    tools: AnyTools | None = None
    """The tools that the model may call: functions, custom tools and namespaces. Hosted tools are ignored."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto", "none", "required", one tool, or allowed_tools. Default: "auto" if there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several tool calls. If false, only the first is kept."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Items[Includable] | None = None
    """message.output_text.logprobs adds the log-probabilities of the text. OpenAI's other values are accepted and add
    nothing: no hosted tool runs, and reasoning is returned unencrypted."""
    top_logprobs: UInt32 | None = None
    """Returns log-probabilities with this many alternatives, at most 20."""
    metadata: Annotated[dict[str, str], FEW_ENTRIES] | None = None
    """Returned unchanged in the response."""
    user: str | None = Field(None, description="Returned unchanged in the response.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")

    @classmethod
    def other_fields(cls) -> AbstractSet[str]:
        """Returns the names for every endpoint, and those for this one."""
        return super().other_fields() | _REFUSED.keys() | _IGNORED

    @model_validator(mode="before")
    @classmethod
    def _needs_no_others(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (asks_for_nothing, remedy) in _REFUSED.items():
            if body.get(name) not in asks_for_nothing:
                raise invalid(name, remedy, code="unsupported_parameter")
        return {name: value for name, value in body.items() if name not in _REFUSED and name not in _IGNORED}


class InputTokens(BaseModel):
    """The length of a prompt, in tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
