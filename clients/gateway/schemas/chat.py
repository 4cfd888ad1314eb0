"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.clients.gateway.schemas.common import (
    GenerationBody,
    Items,
    PromptLogprobs,
    TokenLimit,
    UInt32,
    UsageInfo,
)

_LENIENT = ConfigDict(strict=True, extra="ignore")


class ChatTextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = _LENIENT

    type: str
    text: str | None = None
    refusal: str | None = Field(None, description="Of a part of the type refusal, in a message of the assistant's.")


class FunctionCall(BaseModel):
    """A function with arguments."""

    model_config = _LENIENT

    name: str
    arguments: str = Field(description="The JSON text of an object.")


class MessageToolCall(BaseModel):
    """A call that the model made."""

    model_config = _LENIENT

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatRequestMessage(BaseModel):
    """One message of the conversation."""

    model_config = _LENIENT

    role: str = Field(
        description="system, developer, user, assistant or tool, or another role that the chat template names."
    )
    content: str | Items[ChatTextPart] | None = None
    name: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = Field(default=None, description="Refused: tool_calls has taken its place.")
    reasoning_content: str | None = Field(
        default=None, description="What the model reasoned before this answer. The template decides what it shows."
    )
    reasoning: str | None = Field(default=None, description="Another name of reasoning_content.")


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="True holds calls under `auto` to the schema too, in the formats hermes and mistral."
    )


class Tool(BaseModel):
    """What the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


Messages = Annotated[list[ChatRequestMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]
"""At most the contract's limit: each is a Python object, many times its size in a body."""


class JsonSchema(BaseModel):
    """A JSON schema with a name."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """What form the answer must have."""

    model_config = _LENIENT

    type: str = Field(description="text, json_object or json_schema.")
    json_schema: JsonSchema | None = Field(None, description="The answer is held to it, with or without `strict`.")
    object_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="Of json_object: the answer is held to it. An extension of llama.cpp's."
    )


class ChatRequest(GenerationBody):
    """Answer a conversation."""

    messages: Messages = Field(description="In order.")
    max_tokens: TokenLimit | None = Field(None, description="The same as max_completion_tokens, which is newer.")
    max_completion_tokens: TokenLimit | None = Field(
        None, description="The most tokens of each choice; more than the context leaves is cut. Default: all of that."
    )
    logprobs: bool | None = Field(None, description="Whether each token comes with its log-probability.")
    top_logprobs: UInt32 | None = Field(None, description="The number of alternatives for each token, at most 20.")
    tools: Tools | None = Field(None, description="What the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='"auto", "none", "required" or a function. Default: "auto" with tools.'
    )
    parallel_tool_calls: bool | None = Field(None, description="False keeps only an answer's first call.")
    response_format: ResponseFormat | None = Field(None, description="What form the answer must have.")
    reasoning_effort: str | None = Field(None, description="A variable of the chat template, where it has one.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="A variable of the chat template, where it has one."
    )
    include_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the answer.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    documents: Items[dict[str, Any]] | None = Field(None, description="A variable of the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Whether the assistant's turn is opened.")
    continue_final_message: bool | None = Field(
        None, description="The output goes on with the last message, the assistant's. Not with add_generation_prompt."
    )
    echo: bool | None = Field(None, description="Puts the last message before the output, where that goes on with it.")
    add_special_tokens: Literal[False] | None = Field(None, description="The template has them all.")


class FunctionPiece(BaseModel):
    """A function's name, on a call's first chunk, and what is new of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(BaseModel):
    """A call, or what is new of it."""

    index: int | None = Field(None, description="The call's index; only in chunks.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class AnswerMessage(BaseModel):
    """The answer, or what a chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = Field(None, description="The model's reasoning before its answer, if any.")
    reasoning: str | None = Field(None, description="The same under vLLM's newer name.")
    tool_calls: list[ToolCallPiece] | None = None
    refusal: str | None = None


class TopLogprob(BaseModel):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of all tokens in the answer, including reasoning and calls."""

    content: list[TokenLogprob] | None
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(None, description="The stop string or stop token that ended it.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class ChatCompletion(BaseModel):
    """The answer."""

    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With prompt_logprobs.")


class ChunkChoice(BaseModel):
    """What a chunk adds to a choice."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A part of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
