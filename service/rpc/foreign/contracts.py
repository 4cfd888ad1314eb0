"""Adds the contracts of other engines to the callers' listener, and has what their adapters share.

The adapter of each contract is a folder. It translates requests to those of penstock.v1 and responses back, does not
manage the life cycle of requests, and imports no other adapter.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc
from google.protobuf import any as pb_any
from google.rpc import error_details_pb2, status_pb2

from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.config.contracts import CONTRACTS
from penstock.service.config.limits import Validator
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.errors import StatusError
from penstock.service.requests.adapters import AdapterRegistry
from penstock.service.requests.answer_formats import AnswerFormats
from penstock.service.requests.pooled.embed import EmbedRequestBuilder
from penstock.service.rpc.generation import GenerationService
from penstock.service.rpc.health import Health
from penstock.service.rpc.pooled_calls import PooledCalls
from penstock.service.telemetry.recent_stats import RecentStats
from penstock.service.text.tokenizer import TokenizerPool

if TYPE_CHECKING:
    from penstock.service.kv_publisher.publisher import KvEventPublisher


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The paths of the served model's files."""

    model: Path
    """Its directory, or its GGUF file."""
    tokenizer: Path
    """The directory with its tokenizer.json."""


@dataclass(frozen=True, slots=True)
class ContractParts:
    """The parts of the service that an adapter may need."""

    server: grpc.aio.Server
    model_name: str
    version: str
    adapters: AdapterRegistry
    """The LoRA adapters, which requests name as their model."""
    engine: Engine
    facts: WorkerFacts
    validator: Validator
    pool: TokenizerPool
    generation: GenerationService
    pooled_calls: PooledCalls
    embed_builder: EmbedRequestBuilder
    health: Health
    recent_stats: RecentStats
    defaults: SamplingDefaults
    formats: AnswerFormats
    generates: bool
    files: ModelFiles | None
    """None if unknown: then the contract does not offer them."""
    kv_publisher: Callable[[], "KvEventPublisher | None"]
    """Returns the publisher of KV events over ZeroMQ, which starts after the contracts are added; None without one."""


class AddedContract(Protocol):
    """A contract that is being served."""

    def close(self) -> None:
        """Ends calls that would never end by themselves, because the service shuts down."""


def add_contract(name: str, parts: ContractParts) -> AddedContract:
    """Adds the contract of this name to the server."""
    added: AddedContract = importlib.import_module(CONTRACTS[name].module).add_to_server(parts)
    return added


def protocol_error(code: grpc.StatusCode, message: str) -> StatusError:
    """Returns the error that ends a call with a status that the contract itself defines, and that is therefore not in
    the service's catalogue. ``message`` names the field or method, and the remedy."""
    number: int = code.value[0]
    return StatusError(status_pb2.Status(code=number, message=message))


def renamed_status(status: status_pb2.Status, names: Mapping[str, str]) -> status_pb2.Status:
    """Returns the status of a request, with the contract's name for the field that is wrong, if one is. ``names`` are
    the contract's names by the paths of the fields of penstock.v1; the rest of such a path is unchanged."""
    renamed = status_pb2.Status(code=status.code, message=status.message)
    for detail in status.details:
        problem = error_details_pb2.BadRequest()
        if detail.Unpack(problem):
            for violation in problem.field_violations:
                name = _foreign_name(violation.field, names)
                renamed.message = _with_name(renamed.message, violation.field, name)
                violation.description = _with_name(violation.description, violation.field, name)
                violation.field = name
            detail = pb_any.pack(problem)
        renamed.details.append(detail)
    return renamed


def _foreign_name(field: str, names: Mapping[str, str]) -> str:
    """Returns the contract's name for the longest part of a field's path that has one, with the rest of the path."""
    for name in sorted(names, key=len, reverse=True):
        if field.startswith(name) and field[len(name) : len(name) + 1] in ("", ".", "["):
            return names[name] + field.removeprefix(name)
    return field


def _with_name(text: str, field: str, name: str) -> str:
    return name + text.removeprefix(field) if text.startswith(f"{field}:") else text
