"""Adds the contracts of other engines to the callers' listener. Each is a thin adapter in a folder of its own, which
translates requests to those of penstock.v1 and responses back, and does not manage the life cycle of requests."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import WorkerFacts
from penstock.service.config.contracts import CONTRACTS
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.requests.answer_formats import AnswerFormats
from penstock.service.requests.pooled.embed import EmbedRequestBuilder
from penstock.service.rpc.generation import GenerationService
from penstock.service.rpc.health import Health
from penstock.service.rpc.pooled_calls import PooledCalls
from penstock.service.telemetry.recent_stats import RecentStats
from penstock.service.text.tokenizer import TokenizerPool


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
    engine: Engine
    facts: WorkerFacts
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


class AddedContract(Protocol):
    """A contract that is being served."""

    def close(self) -> None:
        """Ends calls that would never end by themselves, because the service shuts down."""


def add_contract(name: str, parts: ContractParts) -> AddedContract:
    """Adds the contract of this name to the server."""
    added: AddedContract = importlib.import_module(CONTRACTS[name].module).add_to_server(parts)
    return added
