"""The messages by which the agent of another host joins the leader. Plain data; bounded where strangers may send it."""

from typing import Annotated

import msgspec

NONCE_BYTES = 32
PROOF_BYTES = 32

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]


class AgentHello(msgspec.Struct, frozen=True):
    """Introduces the agent of a host."""

    version: ShortText
    """The version of penstock."""
    identity: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """A random number that the agent keeps for as long as it runs: an agent that joins again takes its own place."""
    nonce: Nonce
    node_rank: int = -1
    """The place that it needs; -1: any."""
    settings: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=32)] = {}
    """Flags and values that must be the leader's too."""
    host_name: ShortText = ""
    num_threads: int = 0
    num_gpus: int = 0
    memory_bytes: int = 0


class JoinChallenge(msgspec.Struct, frozen=True):
    """Shows that the leader has the token, and makes the agent show it as well."""

    nonce: Nonce
    proof: Proof = b""
    """Empty: the leader has no token."""


class JoinProof(msgspec.Struct, frozen=True):
    """Shows that the agent has the token."""

    proof: Proof = b""
    """Empty: the agent has no token, or has another one than the leader."""
    has_token: bool = False


class LeaderModel(msgspec.Struct, frozen=True):
    """The model, as the leader's command line names it."""

    name: str
    revision: str | None = None
    gguf_file: str | None = None
    has_weights: bool = True
    """Whether its weights come from files."""


class JoinWelcome(msgspec.Struct, frozen=True):
    """Gives the agent its place."""

    node_rank: int
    num_nodes: int
    ranks_per_node: int
    model: LeaderModel


class ModelReport(msgspec.Struct, frozen=True):
    """The digests of the model's files on the agent's host, or why they cannot be read."""

    config: bytes = b""
    weights: bytes = b""
    tokenizer: bytes = b""
    problem: str = ""


class JoinRefusal(msgspec.Struct, frozen=True):
    """The reason for which an agent cannot join."""

    reason: str
    is_final: bool
    """Whether trying again cannot help."""


class RankEnded(msgspec.Struct, frozen=True):
    """The reason for which a rank's process has ended. See ``ExecutorError``."""

    message: str
    blames_step: bool = False
