"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.clients.gateway.schemas.common import (
    MAX_TOOLS,
    FunctionFields,
    GenerationBody,
    Items,
    Lenient,
    PromptLogprobs,
    ResponseFormat,
    TokenLimit,
    UInt32,
    UsageInfo,
)


class ChatTextPart(Lenient):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = Field(None, description="The refusal, in a part of type refusal of an assistant message.")


class FunctionCall(Lenient):
    """The name and the arguments of a called function."""

    name: str
    arguments: str = Field(description="The arguments: a JSON object, as text.")


class MessageToolCall(Lenient):
    """A tool call that the model made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatRequestMessage(Lenient):
    """One message of the conversation."""

    role: str
    """system, developer, user, assistant, tool, or another role that the chat template supports."""
    content: str | Items[ChatTextPart] | None = None
    name: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = Field(default=None, description="Refused: use tool_calls instead.")
    reasoning_content: str | None = None
    """The model's reasoning before this message. The chat template may leave it out."""
    reasoning: str | None = Field(default=None, description="Another name for reasoning_content.")


class FunctionDefinition(FunctionFields):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


Messages = Annotated[list[ChatRequestMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class PredictedOutput(Lenient):
    """The output that the caller expects."""

    type: Literal["content"]
    content: str | Items[ChatTextPart] = Field(description="The text, or its parts, each of which is a line.")


class ChatRequest(GenerationBody):
    """A request to answer a conversation."""

    messages: Messages = Field(description="The messages of the conversation so far, in order.")
    max_tokens: TokenLimit | None = Field(None, description="The older name of max_completion_tokens.")
    max_completion_tokens: TokenLimit | None = None
    """The maximum number of tokens in each choice. Larger values are reduced to the room left in the context, which is
    also the default."""
    logprobs: bool | None = Field(None, description="Whether to return the log-probability of each output token.")
    top_logprobs: UInt32 | None = None
    """The number of alternative tokens to return at each position, at most 20."""
    tools: Tools | None = Field(None, description="The tools that the model may call.")
    tool_choice: str | dict[str, Any] | None = None
    """"auto", "none", "required" or one function. Default: "auto" if there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several tool calls. If false, only the first is kept."""
    response_format: ResponseFormat | None = Field(None, description="The format that the answer must have.")
    prediction: PredictedOutput | None = None
    """The output that the caller expects, such as a text with a few changes. It may save time, and never changes the
    answer."""
    reasoning_effort: str | None = Field(None, description="Passed to the chat template, if it has such a variable.")
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    """The maximum number of reasoning tokens of each choice; then the reasoning is closed and the answer begins. 0: no
    reasoning; -1: no limit, which is the default."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Passed to the chat template, if it has such a variable."""
    include_reasoning: bool | None = Field(None, description="Whether to return the model's reasoning. Default: true.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    documents: Items[dict[str, Any]] | None = Field(None, description="Documents, passed to the chat template.")
    add_generation_prompt: bool | None = None
    """Whether to open a new assistant message at the end of the prompt. Default: true."""
    continue_final_message: bool | None = None
    """Whether the output continues the last message, which must be an assistant message. Excludes
    add_generation_prompt."""
    echo: bool | None = None
    """Whether to return the last message before the output, if the output continues it."""
    add_special_tokens: Literal[False] | None = None
    """Only false: the chat template adds all special tokens."""


class FunctionPiece(BaseModel):
    """The function's name, in the first chunk of a call, and the new part of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(BaseModel):
    """A tool call, or the part of it that a chunk adds."""

    index: int | None = Field(None, description="The call's index; only in chunks.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class AnswerMessage(BaseModel):
    """The answer's message, or the part of it that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = Field(None, description="The model's reasoning before its answer, if any.")
    reasoning: str | None = Field(None, description="The same as reasoning_content, under vLLM's newer name.")
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
    """One of the n choices."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(None, description="The stop string or stop token that ended the output.")
    token_ids: list[int] | None = Field(None, description="The output's token ids. Only with return_token_ids.")


class ChatCompletion(BaseModel):
    """The response to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="The Unix timestamp, in seconds, of when the response was created.")
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = Field(None, description="The prompt's token ids. Only with return_token_ids.")
    prompt_logprobs: PromptLogprobs | None = Field(
        None, description="The log-probabilities of the prompt's tokens. Only with prompt_logprobs."
    )


class ChunkChoice(BaseModel):
    """The part of a choice that a chunk adds."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of a streamed response."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
