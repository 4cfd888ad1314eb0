"""Tickets: what another replica needs, besides a request and the output received so far, to continue the request token
for token after the service that began it has died.

A ticket has the seed of the sampling, and digests of the rest that decides the next token: the model, how it is
computed, the prompt, the sampling, the constraint and the parsing of the output. It needs no secret: the caller could
send everything in it itself, and the replica computes each digest again. A forged ticket only gives its forger the seed
of its choice.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

import penstock.v1 as pb
from penstock.kv.block_hash import hash_more_blocks
from penstock.models.checkpoint.digest import DIGEST_BYTES, CheckpointDigest, short_digest
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.planning.output_buffer import resume_output
from penstock.scheduler.request import Request, ResumedSequence, SequenceDelta
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.config.limits import MAX_RESUMED_TOKENS, Validator
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.parsers.base import AnswerParser
from penstock.service.requests.answer_formats import OutputFormats
from penstock.service.streaming.outbox import RequestReceiver
from penstock.service.streaming.parsed_output import ParsedChoice, ParsingReceiver
from penstock.service.streaming.pending_message import OutputForm
from penstock.service.streaming.resumed_output import ResumingReceiver

_VERSION = 2
_FIELD = "resume_from.ticket"
_PARTS = {
    "tenant": "another tenant",
    "config": "a model with another config",
    "weights": "a model with other weights",
    "tokenizer": "a model with another tokenizer",
    "numerics": "a service that computes otherwise: its version, backend, instruction set, dtypes or quantization",
    "limits": "a service with other limits on tokens: the model's context, the KV cache or --generation-config",
    "prompt": "another prompt: a chat template may have put the date into it",
    "sampling": "other sampling parameters, of the request or by --generation-config",
    "output": "another constraint, other tools, stop strings or output options, or other parsers of the service",
}
"""The digests in a ticket, in order, and what a ticket with another one is for."""
_LAYOUT = struct.Struct(f"<Bq{DIGEST_BYTES * len(_PARTS)}s{DIGEST_BYTES}s")
"""Version, seed, digests, and a checksum of these."""


class ReplicaDigests(NamedTuple):
    """The digests of a service. Two services with the same ones choose the same tokens."""

    config: bytes = bytes(DIGEST_BYTES)
    weights: bytes = bytes(DIGEST_BYTES)
    tokenizer: bytes = bytes(DIGEST_BYTES)
    numerics: bytes = bytes(DIGEST_BYTES)
    limits: bytes = bytes(DIGEST_BYTES)


UNKNOWN_REPLICA = ReplicaDigests()
"""The digests of a service whose model has no files."""


def digest_replica(
    checkpoint: CheckpointDigest, version: str, facts: WorkerFacts, max_sequence_tokens: int, defaults: SamplingDefaults
) -> ReplicaDigests:
    """Digests a service by its model's files, its version, what its worker reports, and its limits on tokens."""
    numerics = (
        version,
        facts.backend,
        facts.device.partition(":")[0],
        facts.instruction_set,
        facts.dtype,
        facts.kv_cache_dtype,
        facts.quantization,
        facts.vocab_size,
        facts.block_size,
        facts.tensor_parallel_size,
    )
    given = defaults.sampling
    limits = (max_sequence_tokens, defaults.token_limit, given.max_tokens if given.HasField("max_tokens") else None)
    return ReplicaDigests(*checkpoint, short_digest(repr(numerics).encode()), short_digest(repr(limits).encode()))


class PreparedRequest(NamedTuple):
    """A request that is ready for the queue."""

    request: Request
    choices: Sequence[ParsedChoice]
    """One for each choice; none if the output is not parsed."""
    ticket: bytes = b""
    received: Sequence[pb.ReceivedOutput] = ()
    """What its caller has of each choice, if it continues the request of another replica."""
    replayed: Sequence[SequenceDelta] = ()
    """The output that its resumed tokens release. It is parsed already, because that may take long."""

    def received_by(self, receiver: RequestReceiver, form: OutputForm) -> tuple[RequestReceiver, OutputForm]:
        """Returns the receiver of the engine's output, which parses it and drops what the caller has, and its form."""
        if self.received:
            receiver = ResumingReceiver(receiver, self.received)
        if self.choices:
            receiver, form = ParsingReceiver(receiver, self.choices), form._replace(parsed=True)
        return receiver, form

    def replay(self, receiver: RequestReceiver, ref: int, form: OutputForm) -> None:
        """Passes the output of the resumed tokens to the receiver of the engine's output."""
        for delta in self.replayed:
            receiver.delta(ref, delta, form, False)


class Tickets:
    """Issues and honours tickets for one served model."""

    def __init__(self, replica: ReplicaDigests, validator: Validator, block_size: int) -> None:
        """``block_size`` is the number of tokens in a block of the KV cache."""
        self._replica = replica
        self._validator = validator
        self._block_size = block_size

    def check(self, start: pb.GenerationStart) -> None:
        """Checks a start that resumes a request, except for its tokens. Raises ServiceError."""
        if not start.HasField("resume_from"):
            return
        if start.open:
            raise ServiceError(Reason.NOT_RESUMABLE, "an open prompt cannot be resumed; send all of it", field="open")
        if start.output.HasField("prompt_logprobs"):
            message = "log-probabilities of a prompt cannot be resumed; omit them or resume_from"
            raise ServiceError(Reason.NOT_RESUMABLE, message, field="output.prompt_logprobs")
        number, n = len(start.resume_from.choices), start.sampling.n or 1
        if number != n:
            raise invalid("resume_from.choices", f"must have one for each of the n choices, {n}; it has {number}")
        total = sum(len(choice.token_ids) for choice in start.resume_from.choices)
        if total > MAX_RESUMED_TOKENS:
            problem = f"may have {MAX_RESUMED_TOKENS:,} token_ids in all; they have {total:,}: omit them"
            raise invalid("resume_from.choices", problem)
        _read(start.resume_from.ticket)

    def seed(self, start: pb.GenerationStart, tenant: str) -> int | None:
        """Returns the seed of the request that a start resumes; None if it is a new one. Raises ServiceError if its
        ticket is for another tenant or another service. ``start`` has passed ``check``."""
        if not start.HasField("resume_from"):
            return None
        seed, digests = _read(start.resume_from.ticket)
        _compare(digests, (_tenant(tenant), *self._replica))
        if start.sampling.HasField("seed") and start.sampling.seed != seed:
            raise _mismatch("sampling")
        return seed

    def prepared(
        self, request: Request, parsers: Sequence[AnswerParser], start: pb.GenerationStart, formats: OutputFormats
    ) -> PreparedRequest:
        """Returns a request with its ticket, and with the output that it resumes. ``formats`` are those on which its
        output depends. Raises ServiceError."""
        sampling = request.sampling
        own = (
            _tenant(request.tenant),
            *self._replica,
            short_digest(request.tenant.encode(), array("I", request.prompt_token_ids).tobytes()),
            short_digest(_sampling(sampling)),
            _output(start, formats),
        )
        content = _LAYOUT.pack(_VERSION, sampling.seed, b"".join(own), b"")[:-DIGEST_BYTES]
        choices = [ParsedChoice(index, parser) for index, parser in enumerate(parsers)]
        prepared = PreparedRequest(request, choices, content + short_digest(content))
        if not start.HasField("resume_from"):
            return prepared
        _compare(_read(start.resume_from.ticket)[1], own)
        received = start.resume_from.choices
        if any(choice.token_ids for choice in received):
            prepared = prepared._replace(replayed=self._replay(request, choices, received))
        return prepared._replace(received=received)

    def _replay(
        self, request: Request, choices: Sequence[ParsedChoice], received: Sequence[pb.ReceivedOutput]
    ) -> list[SequenceDelta]:
        """Brings the sequences of a request, and its parsers, to where the received tokens end; returns the output that
        these release. Raises ServiceError for tokens that no output can begin with."""
        sequences: list[ResumedSequence] = []
        replayed: list[SequenceDelta] = []
        for index, choice in enumerate(received):
            field = f"resume_from.choices[{index}].token_ids"
            token_ids = list(choice.token_ids)
            number = len(token_ids)
            if number > request.max_tokens:
                raise invalid(field, f"at most {request.max_tokens:,}, the maximum of output tokens; it has {number:,}")
            self._validator.check_ids(token_ids, field)
            output, delta = resume_output(request, index, token_ids)
            if output.num_tokens < number:
                problem = f"the output ends with the token at {output.num_tokens - 1}, and {number} are given"
                raise invalid(field, problem)
            history = request.prompt_token_ids + token_ids
            hashes = hash_more_blocks(history, request.block_hashes, self._block_size, request.hash_salt)
            sequences.append(ResumedSequence(token_ids, hashes, output))
            if delta is not None and choices:
                delta = choices[index].parse(delta)
            if delta is not None:
                replayed.append(delta)
        request.resumed = sequences
        return replayed


def _tenant(tenant: str) -> bytes:
    return short_digest(b"tenant", tenant.encode())


def _sampling(sampling: SamplingParams) -> bytes:
    """Returns how tokens are chosen, without the seed, as bytes."""
    return msgspec.json.encode(msgspec.structs.replace(sampling, seed=0, logprobs=None, prompt_logprobs=None))


def _output(start: pb.GenerationStart, formats: OutputFormats) -> bytes:
    """Digests what constrains an output and decides how it is parsed, besides its sampling. The format in which it is
    sent may change from one replica to the next."""
    chat, output = start.chat, start.output
    parallel = chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls")
    options = (output.include_special_tokens, output.parse_reasoning, output.parse_tool_calls)
    messages = (start.constraint, chat.tool_choice, *chat.tools)
    return short_digest(
        repr((list(start.sampling.stop), parallel, options, formats)).encode(),
        *(message.SerializeToString(deterministic=True) for message in messages),
    )


def _read(ticket: bytes) -> tuple[int, Sequence[bytes]]:
    """Returns the seed and the digests in a ticket. Raises ServiceError if it is damaged."""
    content, checksum = ticket[:-DIGEST_BYTES], ticket[-DIGEST_BYTES:]
    if len(ticket) != _LAYOUT.size or checksum != short_digest(content):
        raise ServiceError(Reason.TICKET_INVALID, field=_FIELD)
    version, seed, digests, _ = _LAYOUT.unpack(ticket)
    if version != _VERSION or seed < 0:
        raise ServiceError(Reason.TICKET_INVALID, field=_FIELD)
    return seed, [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _compare(given: Sequence[bytes], own: Sequence[bytes]) -> None:
    """Raises ServiceError for the first digest that differs; ``own`` may have only the first ones."""
    for name, one, other in zip(_PARTS, given, own, strict=False):
        if one != other:
            raise _mismatch(name)


def _mismatch(part: str) -> ServiceError:
    return ServiceError(
        Reason.TICKET_MISMATCH,
        f"{_FIELD}: it is for {_PARTS[part]}; call a replica that is configured like the first, or omit resume_from",
        field=_FIELD,
        metadata={"differs": part},
    )
