"""The common fields of completions and chats, and the parts of their responses."""

from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.clients.gateway.schemas.unsupported import IGNORED, UNSUPPORTED, without_foreign_fields

T = TypeVar("T")
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenLimit = Annotated[int, Field(ge=0)]
"""Any value; more than the context leaves is reduced to that."""
NumKept = Annotated[int, Field(ge=-1, le=2**31 - 1)]
TRUNCATE = "Keeps this many tokens of a prompt, -1 as many as the context takes. Default: too long a prompt is refused."
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that stops at its first invalid item: an error for each of millions would fill the memory."""
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[UInt32], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]

_MAX_CHOICES = 64
"""The contract's limit, checked here since the reader of each choice is created before the request is sent."""
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
    | Annotated[Texts, Tag("Texts")]
    | Annotated[Ids, Tag("Ids")]
    | Annotated[IdLists, Tag("IdLists")],
    Discriminator(
        _prompts_kind,
        custom_error_type="prompts",
        custom_error_message="must be a text, a list of token ids, or a list of either",
    ),
]
"""Texts or tokens. The first item determines the type of the others, so that the error names the item that differs."""
FewTexts = Annotated[list[str], Field(max_length=_MAX_ENTRIES, fail_fast=True)]
"""At most the contract's limit, since each is a Python object."""


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(
        None, description="Whether a last chunk, without choices, has the usage. Default: false."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: whether every chunk has the usage so far. An extension of vLLM's."
    )
    include_obfuscation: bool | None = Field(None, description="Ignored: there is no padding.")


G = TypeVar("G", bound="GenerationBody")


class Body(BaseModel):
    """The body of any request. An unknown field is an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="The served model's name, as in GET /v1/models. Default: that one.")

    @classmethod
    def other_fields(cls) -> AbstractSet[str]:
        """Returns names outside the schema that are refused or ignored."""
        return UNSUPPORTED.keys() | IGNORED

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, body: Any) -> Any:
        return without_foreign_fields(body, cls.model_fields)


class StructuredOutputs(BaseModel):
    """A constraint on the output: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_schema: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression, of the whole output.")
    choice: FewTexts | None = Field(None, description="One of these.")
    grammar: str | None = Field(None, description="A grammar in the form of Lark or GBNF.")
    json_object: bool | None = Field(None, description="True: any JSON object.")


class SamplingBody(Body):
    """How an answer is chosen. All bounds are those of the gRPC contract, and the service names the field."""

    temperature: float | None = Field(
        None, description="0 takes the most likely token. Default: the model's generation_config.json, else 1."
    )
    top_p: float | None = Field(
        None, description="Only the most likely tokens whose probabilities reach this sum; 0: the most likely one."
    )
    stop: str | Items[str] | None = Field(None, description="Output ends before any of these strings; at most 64.")
    seed: int | None = Field(
        None, ge=-(2**63), le=2**64 - 1, description="Makes sampling repeatable, if the backend is."
    )
    presence_penalty: float | None = Field(None, description="Of each token in the output, once: -2 to 2.")
    frequency_penalty: float | None = Field(None, description="For each time a token is in the output: -2 to 2.")
    logit_bias: Annotated[dict[str, float], FEW_ENTRIES] | None = Field(
        None, description="Added to the logits of tokens, by their ids; at most 1,024."
    )
    top_k: int | None = Field(None, ge=-1, le=2**32 - 1, description="Only the k most likely tokens; 0 or -1: all.")
    min_p: float | None = Field(None, description="Only tokens at least this likely, as a share of the likeliest.")
    repetition_penalty: float | None = Field(None, description="Of tokens in prompt or output.")
    min_tokens: UInt32 | None = Field(None, description="No end of sequence before this many tokens.")
    stop_token_ids: Items[UInt32] | None = Field(None, description="Output ends at any of these tokens too.")
    ignore_eos: bool | None = Field(None, description="Goes on past the model's own end of sequence.")
    bad_words: Items[str] | None = Field(None, description="Strings that the output does not complete.")
    allowed_token_ids: Items[UInt32] | None = Field(None, description="Only these tokens may be chosen.")
    include_stop_str_in_output: bool | None = Field(None, description="Keeps what ended the output in the text.")
    skip_special_tokens: bool | None = Field(None, description="Leaves special tokens out of the text. Default: true.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower runs first, where the service schedules by priority."
    )
    request_id: str | None = Field(None, description="The caller's own id, for the service's logs.")
    max_draft_tokens: UInt32 | None = Field(
        None, description="Tokens that may be drafted in a step, which changes when tokens come, never which; 0: none."
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Of structured_outputs.regex.")
    guided_choice: FewTexts | None = Field(None, description="Of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Of structured_outputs.grammar.")
    constrained_decoding_start: Literal["after_reasoning", "first_token"] | None = Field(
        None,
        description="Where what the output must match begins to hold: after the model's reasoning, which is free, or "
        "with the first token, so that there is no reasoning. Default: after_reasoning.",
    )


class GenerationBody(SamplingBody):
    """Fields of completions and chats."""

    n: Annotated[int, Field(ge=0, le=_MAX_CHOICES)] | None = Field(
        None, description="How many choices: 1 to 64. Default: 1."
    )
    stream: bool | None = Field(None, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Log-probabilities of the prompt's tokens and of this many alternatives. Not with stream."
    )
    truncate_prompt_tokens: NumKept | None = Field(None, description=TRUNCATE)
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which side truncate_prompt_tokens cuts: left keeps the last tokens. Default: left."
    )
    return_token_ids: bool | None = Field(None, description="Adds the token ids of prompt and output to the answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Names tokens "token_id:N" in logprobs.')

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

    cached_tokens: int = Field(description="Tokens from the prefix cache.")


class CompletionTokensDetails(BaseModel):
    """Details of the output's tokens."""

    reasoning_tokens: int = Field(description="Tokens of the reasoning, counted from its text.")


class UsageInfo(BaseModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int = Field(description="For all choices, including stop tokens.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="Of a chat.")


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""vLLM's format: for each token of the prompt (the first has none), the token and its alternatives by id, with
``logprob``, ``rank`` and ``decoded_token``."""
