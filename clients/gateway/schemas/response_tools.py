"""The tools of POST /v1/responses: functions, custom tools, namespaces of both, and the tools that OpenAI hosts."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from penstock.clients.gateway.schemas.common import MAX_TOOLS, FunctionFields, Lenient, type_of


class FunctionTool(FunctionFields):
    """A function that the model may call."""

    type: Literal["function"]


class CustomFormat(Lenient):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="The syntax of the grammar.")
    definition: str | None = Field(None, description="The grammar. It is shown to the model.")


class CustomTool(Lenient):
    """A tool whose input is one text. The model sees it as a function with one string, `input`."""

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: CustomFormat | None = Field(None, description="The format of the input. Default: any text.")


def _kind(tool: Any) -> str:
    """Returns the tag of a tool. Tags are not field names, so error paths leave them out."""
    kind = type_of(tool)
    if kind in ("function", "custom", "namespace"):
        return kind.title()
    return "Hosted" if _HOSTED.fullmatch(kind) else "Unknown"


_HOSTED = re.compile(
    r"apply_patch|code_interpreter|computer(_use(_preview)?)?|file_search|image_generation|local_shell|mcp"
    r"|programmatic_tool_calling|shell|tool_search|web_search(_preview)?(_\d{4}_\d{2}_\d{2})?"
)


class UnknownTool(Lenient):
    """A tool of an unknown type, which the error names."""

    type: Literal["function", "custom", "namespace"]


class UnknownMember(Lenient):
    """A tool of a type that a namespace cannot have."""

    type: Literal["function", "custom"]


NamespaceMember = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[UnknownMember, Tag("Unknown")],
    Discriminator(lambda tool: kind if (kind := _kind(tool)) in ("Function", "Custom") else "Unknown"),
]


class NamespaceTool(Lenient):
    """A named group of functions and custom tools, such as those of one MCP server."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Annotated[list[NamespaceMember], Field(max_length=MAX_TOOLS, fail_fast=True)]


class HostedTool(BaseModel):
    """A tool that OpenAI's service runs, or whose calls have their own format. It is not offered to the model."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[NamespaceTool, Tag("Namespace")]
    | Annotated[HostedTool, Tag("Hosted")]
    | Annotated[UnknownTool, Tag("Unknown")],
    Discriminator(_kind),
]
AnyTools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def is_hosted(kind: object) -> bool:
    """Whether this is the type of a hosted tool."""
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None
