"""Finds the model that a leader serves among the files of this host, and how this host computes its part."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from penstock.clients.host.cpu.thread_placement import CannotPin, ThreadPlacement, place_threads
from penstock.clients.host.machine import Machine
from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.checkpoint.digest import CheckpointDigest, digest_checkpoint
from penstock.models.errors import ModelError
from penstock.models.executor.join_messages import LeaderModel
from penstock.scheduler.worker_config import WorkerConfig
from penstock.service.text.conversion.placing import place_tokenizer
from penstock.service.text.tokenizer_config import TokenizerError


@dataclass(frozen=True)
class HostChoices:
    """What an agent's command line chooses for its host."""

    model: str | None = None
    """None: the leader's."""
    revision: str | None = None
    gguf_file: str | None = None
    threads: int | None = None
    cpu_pinning: str = "auto"
    collective_interface: str | None = None
    log_level: str = "info"
    """The agent's own; the leader chooses that of its ranks."""
    log_format: str = "text"


@dataclass(frozen=True)
class LocalModel:
    """The ``HostModel`` of an agent."""

    path: Path
    tokenizer: Path
    digest: CheckpointDigest
    choices: HostChoices
    num_threads: int
    placement: ThreadPlacement
    max_memory_bytes: int

    def configure(self, config: WorkerConfig) -> WorkerConfig:
        """Returns the config with this host's paths, threads, memory, interface and format of logs."""
        return replace(
            config,
            model=str(self.path.resolve() if self.path.is_dir() else self.path.absolute()),
            tokenizer=None if config.tokenizer is None else str(self.tokenizer.resolve()),
            num_threads=self.num_threads,
            cpu_pinning=self.choices.cpu_pinning,
            thread_cpus=self.placement.cpus,
            thread_nodes=self.placement.nodes,
            max_memory_bytes=self.max_memory_bytes,
            meeting=replace(config.meeting, interface=self.choices.collective_interface or ""),
            log_format=self.choices.log_format,
        )


def find_local_model(served: LeaderModel, choices: HostChoices, machine: Machine, resources: ExitStack) -> LocalModel:
    """Finds the model that the leader serves, or the one that this host's command line names in its place. What is
    made of its tokenizer exists as long as ``resources``. Raises ModelError."""
    own = choices.model is not None
    try:
        path = resolve_model(
            choices.model or served.name,
            served.has_weights,
            choices.revision if own else served.revision,
            choices.gguf_file if own else served.gguf_file,
        )
        tokenizer, converted = place_tokenizer(path, resources)
        if converted is not None:
            tokenizer = converted.file.parent
        digest = digest_checkpoint(path, tokenizer, has_weights=served.has_weights)
        num_threads = choices.threads or machine.topology.num_threads()
        placement = place_threads(machine.topology, num_threads, choices.cpu_pinning)
    except CannotPin as error:
        raise ModelError(str(error)) from error
    except (ModelError, TokenizerError) as error:
        hint = "" if own else "; if this host has the model elsewhere, give --model"
        raise ModelError(f"{error}{hint}") from error
    return LocalModel(path, tokenizer, digest, choices, num_threads, placement, machine.available_bytes)
