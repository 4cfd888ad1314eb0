"""POST /v1/messages: Anthropic's Messages API."""

from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.clients.gateway.schemas.common import MAX_TOOLS, Body, Items, Lenient, Strict, UInt32, type_of
from penstock.clients.gateway.schemas.unsupported import without_foreign_fields

_NOT_SUPPORTED = "must be text: other content is not supported"


class TextBlock(Lenient):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Lenient):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Lenient):
    """Reasoning in an earlier answer. The chat template may leave it out."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Lenient):
    """Encrypted reasoning from another service. Ignored."""

    type: Literal["redacted_thinking"]


def _text_only(block: Any) -> str | None:
    return "Text" if type_of(block) == "text" else None


TextBlocks = Items[
    Annotated[
        Annotated[TextBlock, Tag("Text")],
        Discriminator(_text_only, custom_error_type="content_block", custom_error_message=_NOT_SUPPORTED),
    ]
]


class ToolResultBlock(Lenient):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = Field(None, description="Ignored: chat templates show errors like other results.")


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUseBlock, Tag("Tool_Use")]
    | Annotated[ToolResultBlock, Tag("Tool_Result")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("Redacted_Thinking")],
    Discriminator(
        lambda block: type_of(block).title(),
        custom_error_type="content_block",
        custom_error_message="not a supported block; the type must be text, tool_use, tool_result, thinking or "
        "redacted_thinking",
    ),
]
"""Tags are not field names, so error paths omit them."""


class InputMessage(Lenient):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=4096, fail_fast=True)]


class MessagesTool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="The JSON schema of the input.")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, tool: Any) -> Any:
        kind = type_of(tool)
        if kind not in ("", "custom"):
            raise ValueError(f"type {kind[:60]!r} is not supported; describe the tool as a custom one")
        return tool


class MessagesToolChoice(Strict):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="The tool to call. Only with type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="Whether an answer has at most one call.")


class Thinking(Lenient):
    """Options for the model's reasoning."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: UInt32 | None = Field(None, description="The maximum number of tokens of reasoning.")


class OutputFormat(Lenient):
    """The format that the answer must have."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    """Options for the answer."""

    effort: str | None = Field(None, description="Passed to the chat template as reasoning_effort.")
    format: OutputFormat | None = None


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
_IGNORED = frozenset(
    {
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)


class CountTokensRequest(Body):
    """A request to count the tokens of a conversation."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    """The messages of the conversation so far. If the last one is the assistant's, the answer continues it."""
    system: str | TextBlocks | None = Field(None, description="Instructions for the model.")
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @classmethod
    def other_fields(cls) -> AbstractSet[str]:
        """Returns the unknown fields that are refused or ignored."""
        return _UNSUPPORTED.keys() | _IGNORED

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, body: Any) -> Any:
        return without_foreign_fields(body, cls.model_fields, _UNSUPPORTED, _IGNORED)


class MessagesRequest(CountTokensRequest):
    """A request to answer a conversation."""

    max_tokens: UInt32 = Field(ge=1, description="The maximum number of output tokens.")
    stream: bool | None = Field(None, description="Whether to stream the answer as server-sent events.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=2**32 - 1)
    stop_sequences: Items[str] | None = Field(None, description="Strings before which the answer ends.")


class OutputTokensDetails(BaseModel):
    """Details of the output's tokens."""

    thinking_tokens: int


class MessagesUsage(BaseModel):
    """The number of tokens used. Prompt tokens that were in the prefix cache are only in the second number."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks of type thinking, text and tool_use.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int
