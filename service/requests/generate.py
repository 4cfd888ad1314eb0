"""Converts a ``start`` to a request for the scheduler: makes checks beyond the fields' rules, and tokenizes the prompt.

Knows neither streams nor the engine. ``check`` is for the event loop; the slow work of ``prepare`` runs in the
tokenizer's thread pool.
"""

import functools
import secrets
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

import msgspec
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import Context, Event, Prompt, Request, TextState
from penstock.scheduler.worker_config import MAX_FORCED_DRAFTS, MAX_PREDICTED_DRAFTS
from penstock.service.config.field_rules import Limit
from penstock.service.config.limits import Validator
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.requests.adapters import AdapterRegistry
from penstock.service.requests.answer_formats import AnswerFormats
from penstock.service.requests.answer_parsing import AnswerParsing
from penstock.service.requests.chat import ToolSchemas, check_chat, parse_chat, shows_tools, with_options
from penstock.service.requests.contexts import StoredContext
from penstock.service.requests.cost import check_cost, check_token_texts, fit_whole
from penstock.service.requests.grammar_check import GrammarChecks, check_constraint
from penstock.service.requests.prediction import predicted_ids
from penstock.service.requests.preparation import Origin
from penstock.service.requests.resumption import UNKNOWN_REPLICA, PreparedRequest, ReplicaDigests, Tickets
from penstock.service.requests.tool_choice import CallConstraints
from penstock.service.streaming.pending_message import OutputForm
from penstock.service.text.detokenizer import IdsOnly, text_states
from penstock.service.text.tokenizer import TokenizerPool
from penstock.service.text.truncation import Truncation

_FORMS: Mapping[int, OutputForm] = {
    pb.OUTPUT_FORMAT_UNSPECIFIED: OutputForm(text=True, token_ids=False),
    pb.OUTPUT_FORMAT_TEXT: OutputForm(text=True, token_ids=False),
    pb.OUTPUT_FORMAT_TOKEN_IDS: OutputForm(text=False, token_ids=True),
    pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS: OutputForm(text=True, token_ids=True),
}


class ResponseMode(Enum):
    """How the output is sent, which limits its size."""

    STREAMED = auto()
    WHOLE = auto()
    """The output is sent in one message."""


class RequestBuilder:
    """Builds generation requests for one served model."""

    def __init__(
        self,
        validator: Validator,
        pool: TokenizerPool,
        model_name: str,
        max_sequence_tokens: int,
        *,
        max_retain_s: float,
        max_drafts: int = 0,
        drafts_predictions: bool = True,
        grammars: GrammarChecks,
        defaults: SamplingDefaults | None = None,
        generates: bool = True,
        formats: AnswerFormats | None = None,
        auto_retain_s: Callable[[str, str], float] = lambda tenant, session_id: 0.0,
        replica: ReplicaDigests = UNKNOWN_REPLICA,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """``max_sequence_tokens`` is the maximum length of a choice with its prompt: the model's context or the KV
        cache's size, whichever is less. ``max_retain_s`` is the longest time for which KV can be retained, and the
        default for requests that continue others. ``max_drafts`` is the maximum number of draft tokens per choice and
        step. ``drafts_predictions``: whether predictions are used. ``defaults`` are the model's sampling defaults.
        ``generates``: whether the model has an output head; otherwise every request is refused. ``formats`` are those
        of the model's outputs; by default none are known. ``auto_retain_s`` returns how long KV is retained in the mode
        AUTO for a tenant, with or without a session. ``replica`` is what this service's tickets are for. ``adapters``
        are those that requests may name as their model."""
        self._generates = generates
        self._auto_retain_s = auto_retain_s
        self._validator = validator
        self._pool = pool
        self._tokenizer = pool.tokenizer
        self.adapters = adapters or AdapterRegistry(model_name)
        self._max_sequence_tokens = max_sequence_tokens
        self._max_retain_s = max_retain_s
        self._max_drafts = max_drafts
        self._drafts_predictions = drafts_predictions
        self._grammars = grammars
        self._defaults = SamplingDefaults() if defaults is None else defaults
        formats = AnswerFormats() if formats is None else formats
        self._parsing = AnswerParsing(pool.tokenizer, formats)
        self._calls = CallConstraints(formats)
        self._tickets = Tickets(replica, validator, pool.block_size)

    def check(self, start: pb.GenerationStart) -> None:
        """Makes all checks that are possible before the prompt is tokenized. Raises ServiceError. The prompt of a start
        that is ``open`` may be missing."""
        self._validator.check(start)
        if not self._generates:
            raise ServiceError(Reason.NO_GENERATION)
        prompt = start.WhichOneof("prompt")
        if prompt is None and not start.continue_from and not start.open:
            raise invalid("prompt", "is required; set text, token_ids or chat")
        if prompt == "text" and self._truncation(start) is None:
            self._pool.check_text(start.text)
        if prompt == "token_ids" and self._truncation(start) is None:
            self._validator.check_num_ids(start.token_ids.ids, "token_ids.ids", Limit.PROMPT)
        if prompt == "chat":
            check_chat(start.chat, self._tokenizer.chat_template(shows_tools(start.chat)))
        if self._calls.applies(start):
            self._calls.check(start)
        elif start.HasField("constraint"):
            check_constraint(start)
        self._parsing.check(start)
        self._tickets.check(start)
        check_token_texts(start.output, self._tokenizer.pieces.longest_bytes)
        sampling = start.sampling
        if sampling.HasField("max_tokens"):
            if sampling.min_tokens > sampling.max_tokens:
                raise invalid("sampling.min_tokens", f"must be at most max_tokens, {sampling.max_tokens:,}")
            # How much of max_tokens fits in the context is only known with the prompt. This much cost is certain.
            check_cost(sampling.n or 1, None, None, 1, min(sampling.max_tokens, self._left(1)))

    def output_form(self, start: pb.GenerationStart) -> OutputForm:
        """Returns the parts of the output to send. ``start`` has passed ``check``."""
        form = _FORMS[start.output.format]
        return form._replace(token_text=self._tokenizer.pieces.by_itself if start.output.include_token_texts else None)

    def cut_max_tokens(self, request: Request, max_tokens: int) -> int:
        """Returns the effective value of a new ``max_tokens`` for a prepared request. Raises ServiceError."""
        num_prompt_tokens, sampling = len(request.prompt_token_ids), request.sampling
        max_tokens = min(max_tokens, self._left(num_prompt_tokens))
        if max_tokens < sampling.min_tokens:
            raise invalid("max_tokens", f"must be at least min_tokens, {sampling.min_tokens:,}; it is {max_tokens:,}")
        check_cost(request.n, sampling.logprobs, sampling.prompt_logprobs, num_prompt_tokens, max_tokens)
        return max_tokens

    def check_append(self, append: pb.GenerationAppend, with_tools: bool) -> None:
        """Makes all checks that are possible before the content is tokenized. ``with_tools``: whether the request's
        chat shows tools. Raises ServiceError."""
        self._validator.check(append)
        kind = append.WhichOneof("content")
        if kind is None:
            raise invalid("content", "is required; set text, token_ids or chat")
        if kind == "chat":
            check_chat(append.chat, self._tokenizer.chat_template(with_tools or shows_tools(append.chat)))

    async def prepare_injection(self, append: pb.GenerationAppend, options: pb.Chat, tenant: str) -> list[int]:
        """Returns the tokens to inject. ``append`` has passed ``check_append``; ``options`` are those of the request's
        chat. Raises ServiceError."""
        work = functools.partial(self._injection, append, options)
        return await self._pool.run(work, append.ByteSize() + options.ByteSize(), tenant)

    def _injection(self, append: pb.GenerationAppend, options: pb.Chat) -> list[int]:
        kind = append.WhichOneof("content")
        limit = self._pool.limit("token_ids.ids" if kind == "token_ids" else kind or "")
        if kind == "text":
            token_ids = self._tokenizer.encode_after(append.text, limit)
        elif kind == "chat":
            token_ids = self._tokenizer.encode_chat_after(parse_chat(with_options(append.chat, options)), limit)
        else:
            token_ids = list(append.token_ids.ids)
        limit.check(len(token_ids))
        self._tokenizer.check_ids(token_ids, limit.field)
        return token_ids

    async def prepare(
        self,
        start: pb.GenerationStart,
        origin: Origin,
        sink: Callable[[Event], None],
        answer: ResponseMode = ResponseMode.STREAMED,
        context: StoredContext | None = None,
    ) -> PreparedRequest:
        """Returns the scheduler's request, and the parsers of its output. ``start`` has passed ``check``; ``context``
        is the context of the request that it continues. Raises ServiceError."""
        grammar, schemas = "", ToolSchemas(start.chat)
        if self._calls.applies(start):
            grammar = await self._call_grammar(start, schemas, origin.tenant)
        elif start.constraint.WhichOneof("kind") is not None:
            grammar = await self._grammars.grammar(start.constraint, origin.tenant)
        work = functools.partial(self.make, start, origin, sink, answer, context, grammar, schemas)
        return await self._pool.run(work, start.ByteSize(), origin.tenant)

    async def check_in_thread(
        self, make_start: Callable[[], pb.GenerationStart], num_bytes: int, tenant: str
    ) -> pb.GenerationStart:
        """Builds a start and checks it, in a thread: its prompt of about ``num_bytes`` may have many parts. Raises
        ServiceError."""

        def work() -> pb.GenerationStart:
            start = make_start()
            self.check(start)
            return start

        return await self._pool.run(work, num_bytes, tenant)

    async def _call_grammar(self, start: pb.GenerationStart, schemas: ToolSchemas, tenant: str) -> str:
        """Returns the grammar of an output whose calls are constrained. Raises ServiceError."""
        work = functools.partial(self._calls.constraint, start, schemas)
        constraint = await self._pool.run(work, start.chat.ByteSize(), tenant)
        try:
            return await self._grammars.grammar(constraint, tenant)
        except ServiceError as error:
            raise self._calls.renamed(error, start) from None

    def make(
        self,
        start: pb.GenerationStart,
        origin: Origin,
        sink: Callable[[Event], None],
        answer: ResponseMode = ResponseMode.STREAMED,
        context: StoredContext | None = None,
        grammar: str = "",
        schemas: ToolSchemas | None = None,
    ) -> PreparedRequest:
        """Does the part of ``prepare`` that runs in a thread. ``grammar`` is the output's grammar, if it has one."""
        schemas = schemas or ToolSchemas(start.chat)
        if (seed := self._tickets.seed(start, origin.tenant)) is not None:
            start.sampling.seed = seed
        adapter, salt = self.adapters.resolve(start.model, origin.tenant)
        if context is None:
            prompt = self._prompt(start, schemas, salt)
        else:
            prompt = self._continued(start, schemas, salt, context.unpacked(b"" if adapter is None else adapter.digest))
        n, num_prompt_tokens = start.sampling.n or 1, len(prompt.token_ids)
        max_tokens = self._max_tokens(start, num_prompt_tokens)
        if answer is ResponseMode.WHOLE:
            longest_bytes = self._tokenizer.pieces.longest_bytes
            max_tokens = fit_whole(start, self.output_form(start), longest_bytes, num_prompt_tokens, max_tokens)
        logprobs, prompt_logprobs = (_optional(start.output, name) for name in ("logprobs", "prompt_logprobs"))
        check_cost(n, logprobs, prompt_logprobs, num_prompt_tokens, max_tokens)
        predicts = self._drafts_predictions
        prediction = predicted_ids(start.prediction, self._tokenizer, self._validator) if predicts else []
        ttft_ms, tpot_ms = (_optional(start, name) for name in ("ttft_slo_ms", "tpot_slo_ms"))
        request = Request(
            request_id=origin.request_id,
            prompt_token_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes,
            sampling=self._limited(self._sampling(start), start, prompt.token_ids, grammar),
            max_tokens=max_tokens,
            sink=sink,
            make_text=self._make_text(start),
            n=n,
            tenant=origin.tenant,
            priority=start.priority,
            deadline=origin.deadline,
            retain_s=self._retain_s(start, origin.tenant),
            max_tokens_is_default=not start.sampling.HasField("max_tokens"),
            client_request_id=start.client_request_id,
            session_id=start.session_id,
            first_token_target=None if ttft_ms is None else max(origin.arrival, origin.committed) + ttft_ms / 1000,
            target_itl_s=None if tpot_ms is None else tpot_ms / 1000,
            arrival=origin.arrival,
            hash_salt=salt,
            adapter=adapter,
            max_drafts=self._drafts(start, grammar, prediction),
            prediction=prediction,
            measures_text=self._parsing.parses(start),
            grammar=self._whole_grammar(start, grammar, prompt.token_ids, max_tokens),
            grammar_end_ids=frozenset(self._tokenizer.eos_token_ids if grammar else ()),
        )
        parsers = self._parsing.parsers(start, prompt.token_ids, schemas, is_constrained=bool(grammar))
        return self._tickets.prepared(request, parsers, start, self._parsing.formats_of(start, grammar))

    def _limited(
        self, sampling: SamplingParams, start: pb.GenerationStart, prompt: list[int], grammar: str
    ) -> SamplingParams:
        """Adds the limit on the reasoning."""
        is_constrained = bool(grammar) and not self._calls.includes_reasoning(start)
        limit = self._parsing.reasoning_limit(start, prompt, is_constrained=is_constrained)
        return sampling if limit is None else msgspec.structs.replace(sampling, reasoning=limit)

    def _whole_grammar(self, start: pb.GenerationStart, grammar: str, prompt: list[int], max_tokens: int) -> str:
        if not grammar or self._calls.includes_reasoning(start):
            return grammar
        return self._parsing.after_reasoning(grammar, start, prompt, max_tokens)

    def _prompt(self, start: pb.GenerationStart, schemas: ToolSchemas, salt: bytes) -> Prompt:
        kind = start.WhichOneof("prompt")
        truncation = self._truncation(start)
        if kind == "text":
            limit = self._pool.limit("text")
            return self._pool.prompt(self._tokenizer.encode(start.text, True, truncation, limit), salt, limit)
        if kind == "chat":
            limit = self._pool.limit("chat")
            chat = parse_chat(start.chat, schemas)
            token_ids = self._tokenizer.encode_chat(chat, limit if truncation is None else None)
        else:
            limit, token_ids = self._pool.limit("token_ids.ids"), list(start.token_ids.ids)
            self._validator.check_ids(token_ids, limit.field)
        return self._pool.prompt(token_ids if truncation is None else truncation.cut(token_ids), salt, limit)

    def _continued(self, start: pb.GenerationStart, schemas: ToolSchemas, salt: bytes, context: Context) -> Prompt:
        kind = start.WhichOneof("prompt")
        field: str = "token_ids.ids" if kind == "token_ids" else kind or "continue_from"
        truncation = self._truncation(start)
        limit = self._pool.limit(field, num_context_tokens=len(context.token_ids))
        most = limit if truncation is None else None
        more: list[int] = []
        if kind == "text":
            more = self._tokenizer.encode_after(start.text, most)
        elif kind == "chat":
            more = self._tokenizer.encode_chat_after(parse_chat(start.chat, schemas), most)
        elif kind == "token_ids":
            more = list(start.token_ids.ids)
            self._validator.check_ids(more, field)
        if truncation is not None and len(context.token_ids) + len(more) > truncation.max_tokens:
            cut = truncation.cut(context.token_ids + more)
            return self._pool.prompt(cut, salt, self._pool.limit(field))
        return self._pool.prompt(more, salt, limit, context)

    def _truncation(self, start: pb.GenerationStart) -> Truncation | None:
        return Truncation.of(start, self._validator.limits.max_model_len - 1)

    def _left(self, num_prompt_tokens: int) -> int:
        """Returns the maximum number of output tokens after a prompt. It is at least 1: if the KV cache is smaller than
        the context, the scheduler refuses a prompt that is too long, but this limit must not."""
        left = max(1, self._max_sequence_tokens - num_prompt_tokens)
        return left if self._defaults.token_limit is None else min(left, self._defaults.token_limit)

    def _retain_s(self, start: pb.GenerationStart, tenant: str) -> float:
        if start.HasField("retain_ms"):
            return min(start.retain_ms / 1000, self._max_retain_s)
        is_auto = start.retain_mode == pb.RETAIN_MODE_AUTO or (start.session_id and not start.continue_from)
        if is_auto:
            return min(self._auto_retain_s(tenant, start.session_id), self._max_retain_s)
        return self._max_retain_s if start.continue_from else 0.0

    def _drafts(self, start: pb.GenerationStart, grammar: str, prediction: list[int]) -> int:
        predicted = MAX_PREDICTED_DRAFTS if prediction else 0
        most = max(self._max_drafts, predicted, MAX_FORCED_DRAFTS if grammar else 0)
        return min(start.max_draft_tokens, most) if start.HasField("max_draft_tokens") else most

    def _max_tokens(self, start: pb.GenerationStart, num_prompt_tokens: int) -> int:
        sampling = start.sampling
        max_tokens = self._left(num_prompt_tokens)
        for given in (sampling, self._defaults.sampling):
            if given.HasField("max_tokens"):
                max_tokens = min(max_tokens, given.max_tokens)
                break
        if sampling.min_tokens > max_tokens:
            raise invalid(
                "sampling.min_tokens", f"must be at most {max_tokens:,}, the number of tokens that fit after the prompt"
            )
        return max_tokens

    def _sampling(self, start: pb.GenerationStart) -> SamplingParams:
        sampling, output = self._defaults.applied(start.sampling), start.output
        stop_token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids.update(self._tokenizer.eos_token_ids)
        allowed = list(sampling.allowed_token_ids)
        self._validator.check_ids(allowed, "sampling.allowed_token_ids")
        bad_words = self._tokenizer.bad_word_ids(sampling.bad_words)
        masked = {word[0] for word in bad_words if len(word) == 1}
        if sampling.min_tokens:
            masked |= stop_token_ids
        if allowed and masked.issuperset(allowed):
            raise invalid(
                "sampling.allowed_token_ids", "bad_words, or stop tokens with min_tokens, exclude all of them"
            )
        takes_likeliest = sampling.HasField("top_p") and not sampling.top_p
        temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
        return SamplingParams(
            temperature=0.0 if takes_likeliest else temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p or 1.0,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sorted(stop_token_ids)),
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
            allowed_token_ids=tuple(sorted(set(allowed))) if allowed else None,
            bad_words=bad_words,
            logprobs=_optional(output, "logprobs"),
            prompt_logprobs=_optional(output, "prompt_logprobs"),
        )

    def _make_text(self, start: pb.GenerationStart) -> Callable[[], TextState]:
        if not self.output_form(start).text and not start.sampling.stop:
            return IdsOnly
        sampling, with_specials = start.sampling, start.output.include_special_tokens
        shown_ids = self._parsing.shown_ids(start)
        return text_states(self._tokenizer, sampling.stop, with_specials, sampling.min_tokens, shown_ids)


def _optional(message: Message, field: str) -> Any:
    """Returns an optional field; None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None
