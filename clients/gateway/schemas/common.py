"""The common fields of completions and chats, and the parts of their responses."""

from collections.abc import Sequence, Set as AbstractSet
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.clients.gateway.schemas.unsupported import IGNORED, UNSUPPORTED, without_foreign_fields

T = TypeVar("T")
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenLimit = Annotated[int, Field(ge=1)]
"""More than the context leaves is reduced to that."""
NumKept = Annotated[int, Field(ge=-1, le=2**31 - 1)]
TRUNCATE = (
    "The maximum number of prompt tokens to keep; -1: as many as fit in the context. Default: a prompt that is too "
    "long is refused."
)
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that stops at its first invalid item: an error for each of millions would fill the memory."""
Ids = Items[UInt32]
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""The types of text in a message; the second and third are those of the Responses API."""

MAX_TOOLS = 128
"""The contract's limit. The schemas apply it first: a parsed tool takes many times its size in a body."""
_MAX_CHOICES = 64
"""The contract's limit, checked here since the reader of each choice is created before the request is sent."""
_MAX_TICKET_CHARS = 172
"""The contract's limit of 128 bytes, as base64 with padding."""
_MAX_ENTRIES = 1024


def _not_too_many(given: Any) -> Any:
    """Checks the contract's limit on entries of a map, before each of them may cause an error."""
    if isinstance(given, dict) and len(given) > _MAX_ENTRIES:
        raise ValueError(f"at most {_MAX_ENTRIES:,} entries; there are {len(given):,}")
    return given


FEW_ENTRIES = BeforeValidator(_not_too_many)


def few(most: int, what: str) -> BeforeValidator:
    """Limits a list of texts or of lists, before each of millions is validated; the number of ids is not limited."""

    def check(given: Any) -> Any:
        if isinstance(given, list) and len(given) > most and not isinstance(given[0], int):
            raise ValueError(f"at most {most:,} {what}; there are {len(given):,}")
        return given

    return BeforeValidator(check)


def _prompts_kind(given: Any) -> str | None:
    if isinstance(given, str):
        return "Text"
    if not isinstance(given, list):
        return None
    first = given[0] if given else ""
    return "Texts" if isinstance(first, str) else "IdLists" if isinstance(first, list) else "Ids"


Prompts = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[Items[str], Tag("Texts")]
    | Annotated[Ids, Tag("Ids")]
    | Annotated[Items[Ids], Tag("IdLists")],
    Discriminator(
        _prompts_kind,
        custom_error_type="prompts",
        custom_error_message="must be a text, a list of token ids, or a list of either",
    ),
]
"""Texts or tokens. The first item determines the type of the others, so that the error names the item that differs."""


def is_single(prompts: Any) -> bool:
    """Whether these ``Prompts``, which are not empty, are one text or the ids of one."""
    return isinstance(prompts, str) or isinstance(prompts[0], int)


FewTexts = Annotated[list[str], Field(max_length=_MAX_ENTRIES, fail_fast=True)]
"""At most the contract's limit, since each is a Python object."""


def type_of(given: Any) -> str:
    """Returns the ``type`` of an object in a body, parsed or not; empty if it has none."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return str(kind or "")


class Strict(BaseModel):
    """A part of a body whose unknown fields are refused. Docstrings of fields are their descriptions."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


class Lenient(BaseModel):
    """A part of a body whose unknown fields are ignored. Docstrings of fields are their descriptions."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


class FunctionFields(Lenient):
    """What a function's definition has in each API."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of the arguments.")
    strict: bool | None = None
    """Whether calls under `auto` must match the schema too. Supported for the formats hermes and mistral."""


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Whether to send one more chunk at the end, with the usage and no choices. Default: false."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far. Only with include_usage. An extension from vLLM."""
    include_obfuscation: bool | None = Field(None, description="Ignored: chunks are never padded.")


G = TypeVar("G", bound="GenerationBody")


class Body(Strict):
    """The body of any request. An unknown field is refused with an error that names it."""

    model: str | None = Field(None, description="The model's name, as in GET /v1/models. Default: that model.")

    @classmethod
    def other_fields(cls) -> AbstractSet[str]:
        """Returns the names outside the schema that are refused or ignored."""
        return UNSUPPORTED.keys() | IGNORED

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, body: Any) -> Any:
        return without_foreign_fields(body, cls.model_fields)


class StructuredOutputs(Strict):
    """A constraint on the output. Set exactly one of the fields."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    """The output is JSON that matches this schema."""
    regex: str | None = Field(None, description="The whole output matches this regular expression.")
    choice: FewTexts | None = Field(None, description="The output is one of these texts.")
    grammar: str | None = Field(None, description="The output matches this grammar, written in Lark or GBNF.")
    json_object: bool | None = Field(None, description="If true, the output is any JSON object.")
    structural_tag: str | dict[str, Any] | None = Field(None, description="The output matches this structural tag.")


class JsonSchema(BaseModel):
    """A JSON schema with a name."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Lenient):
    """The format that the answer must have."""

    type: str = Field(description="text, json_object, json_schema or structural_tag.")
    json_schema: JsonSchema | None = None
    """The schema that the answer must match, with or without `strict`."""
    object_schema: dict[str, Any] | None = Field(
        None,
        alias="schema",
        description="With json_object: a JSON schema that the answer must match. An extension from llama.cpp.",
    )
    format: Any = None
    """The format of a structural tag, as in vLLM and xgrammar."""
    structures: Any = None
    """The older form of a structural tag: objects with the begin, schema and end of a tagged part."""
    triggers: Any = None
    """The strings that begin the tagged parts of structures."""

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The structural tag, without the fields that are not set."""
        tag = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return {"type": "structural_tag"} | {name: value for name, value in tag.items() if value is not None}


class QueuedBody(Body):
    """The body of a request that waits in the service's queue."""

    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    """Requests with lower values run first, if the service schedules by priority."""
    request_id: str | None = Field(None, description="The client's own id for the request, for the service's logs.")


class SamplingBody(QueuedBody):
    """The sampling options. The service checks their limits, as defined by the gRPC contract."""

    temperature: float | None = None
    """The sampling temperature; 0 always takes the most likely token. Default: the value in the model's
    generation_config.json, else 1."""
    top_p: float | None = None
    """Samples only from the most likely tokens whose probabilities add up to this value; 0: the most likely one."""
    stop: str | Items[str] | None = None
    """Up to 64 strings. The output ends before the first one that appears."""
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    """Requests with the same seed and options return the same output, if the backend is deterministic."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token that is in the output: -2 to 2."""
    frequency_penalty: float | None = None
    """Subtracted from the logit of a token once for each time it is in the output: -2 to 2."""
    logit_bias: Annotated[dict[str, float], FEW_ENTRIES] | None = None
    """Values to add to the logits of tokens, by token id; at most 1,024."""
    top_k: int | None = Field(None, ge=-1, le=2**32 - 1)
    """Samples only from the k most likely tokens; 0 or -1: all tokens."""
    min_p: float | None = None
    """Samples only from tokens with at least this fraction of the probability of the most likely one."""
    repetition_penalty: float | None = None
    """Makes tokens in the prompt or the output less likely if above 1, more likely if below 1."""
    min_tokens: UInt32 | None = Field(None, description="The minimum number of output tokens.")
    stop_token_ids: Items[UInt32] | None = Field(None, description="Further tokens that end the output.")
    ignore_eos: bool | None = None
    """Whether to continue past the model's end-of-sequence tokens. Default: false."""
    bad_words: Items[str] | None = Field(None, description="Strings that must not appear in the output.")
    allowed_token_ids: Items[UInt32] | None = Field(None, description="The only tokens that may be chosen.")
    include_stop_str_in_output: bool | None = None
    """Whether the text includes the stop string or stop token that ended it. Default: false."""
    skip_special_tokens: bool | None = None
    """Whether to leave special tokens out of the text. Default: true."""
    max_draft_tokens: UInt32 | None = None
    """The maximum number of tokens to draft per step; 0: none. Affects the speed, never the output."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: FewTexts | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="The older name of structured_outputs.grammar.")
    structural_tag: str | dict[str, Any] | None = None
    """The older name of structured_outputs.structural_tag."""
    constrained_decoding_start: Literal["after_reasoning", "first_token"] | None = Field(
        None,
        description="Where a constraint on the output starts to apply: after the model's reasoning, which is "
        "unconstrained, or from the first token, so that there is no reasoning. Default: after_reasoning.",
    )


class ReceivedChoice(Strict):
    """What was received of one choice, added up over the chunks of all streams so far. Characters are Unicode code
    points."""

    token_ids: Ids | None = None
    """The output's token ids, if the request has return_token_ids. They save their generation, and without them
    log-probabilities are sent again. Together at most 131,072."""
    text_chars: UInt32 = Field(0, description="The number of characters of the text, or of a chat's content.")
    reasoning_chars: UInt32 = Field(0, description="The number of characters of reasoning_content.")
    tool_calls: UInt32 = Field(0, description="The number of tool calls that began.")
    argument_chars: UInt32 = Field(0, description="The number of characters of the arguments of the last of these.")
    has_ended: bool = Field(False, description="Whether the choice's finish_reason was received.")


class ResumeFrom(Strict):
    """A stream that broke off, and what was received of it."""

    ticket: str = Field(min_length=1, max_length=_MAX_TICKET_CHARS)
    """The header x-penstock-resume-ticket of the broken stream, or of any stream that continued it."""
    choices: Annotated[list[ReceivedChoice], Field(min_length=1, max_length=_MAX_CHOICES, fail_fast=True)]
    """One for each of the n choices, in the order of their indexes."""


class GenerationBody(SamplingBody):
    """Fields of completions and chats."""

    n: Annotated[int, Field(ge=0, le=_MAX_CHOICES)] | None = None
    """The number of choices to generate for each prompt: 1 to 64. Default: 1."""
    stream: bool | None = Field(None, description="Whether to stream the response as server-sent events.")
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Returns the log-probabilities of the prompt's tokens, with this many alternatives. Excludes stream."""
    truncate_prompt_tokens: NumKept | None = Field(None, description=TRUNCATE)
    truncation_side: Literal["left", "right"] | None = None
    """The side of the prompt that truncate_prompt_tokens cuts: left keeps the last tokens. Default: left."""
    resume_from: ResumeFrom | None = None
    """Continues a stream that broke off, at this gateway or another one. The other fields are those of its request.
    Only with stream, and not with echo."""
    return_token_ids: bool | None = None
    """Whether to return the token ids of the prompt and the output."""
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs show tokens as "token_id:N" instead of text."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def received_choices(self) -> Sequence[ReceivedChoice]:
        """What the caller has of each choice, if it continues a stream."""
        return () if self.resume_from is None else self.resume_from.choices

    @property
    def num_choices(self) -> int:
        """The number of choices for each prompt."""
        return 1 if self.n is None else self.n


def without_texts(body: G) -> G:
    """Returns a copy with only a request's numbers and switches, to keep during the response: texts and lists may be
    large."""
    kept = (bool, int, float)
    return body.model_copy(update={name: None for name, value in body if not isinstance(value, kept)})


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="The number of tokens found in the prefix cache.")


class CompletionTokensDetails(BaseModel):
    """Details of the output's tokens."""

    reasoning_tokens: int = Field(description="The number of reasoning tokens, counted from their text.")
    accepted_prediction_tokens: int | None = Field(
        None, description="Tokens drafted from the prediction that are in the output. Only with a prediction."
    )
    rejected_prediction_tokens: int | None = Field(
        None, description="Tokens drafted from the prediction that are not in the output. They are not charged."
    )


class UsageInfo(BaseModel):
    """The number of tokens used."""

    prompt_tokens: int
    completion_tokens: int = Field(description="The tokens of all choices, including stop tokens.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="Only for chats.")


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""vLLM's format: for each token of the prompt (the first has none), the token and its alternatives by id, with
``logprob``, ``rank`` and ``decoded_token``."""
