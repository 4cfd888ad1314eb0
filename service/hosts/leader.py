"""Makes the leader of ``penstock serve --nnodes``, and describes how the other hosts join it."""

import shlex
import socket
from pathlib import Path

from penstock.clients.host.distribution import installed_version
from penstock.models.checkpoint.digest import CheckpointDigest
from penstock.models.executor.join.leader import Leader, LeaderSettings
from penstock.models.executor.join_messages import LeaderModel
from penstock.service.config.addresses import Address, ListenError
from penstock.service.config.host_flags import read_networks
from penstock.service.config.serve_config import ServeConfig
from penstock.service.hosts.credentials import JoinCredentials

SHARED_FLAGS = (
    "nnodes", "tensor_parallel_size", "pipeline_parallel_size", "device", "backend", "dtype", "quantization",
    "kv_cache_dtype", "load_format", "max_model_len",
)  # fmt: skip
"""Flags that hosts of ``penstock serve`` must have alike. The leader's count for all others."""
_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - only compared with


def new_leader(config: ServeConfig, credentials: JoinCredentials, digest: CheckpointDigest) -> Leader:
    """Returns the leader that a config describes. It does not listen yet."""
    path = Path(config.model).expanduser()
    model = LeaderModel(
        # A path of this host; on the others, the model may be elsewhere.
        name=str(path.absolute()) if path.exists() else config.model,
        revision=config.revision,
        gguf_file=config.gguf_file,
        has_weights=config.load_format != "dummy",
    )
    return Leader(
        LeaderSettings(
            host=config.master_addr,
            port=config.master_port,
            num_nodes=config.nnodes,
            ranks_per_node=config.ranks_per_node,
            version=installed_version(),
            model=model,
            digest=digest,
            settings=shared_settings(config),
            token=credentials.token,
            tls=credentials.tls,
            allowed=read_networks(config.join_allow),
            timeout_s=config.join_timeout,
        )
    )


def shared_settings(config: ServeConfig) -> dict[str, str]:
    """Returns the flags that all hosts must have alike, and their values."""
    return {f"--{name.replace('_', '-')}": str(getattr(config, name)) for name in SHARED_FLAGS}


async def open_leader(leader: Leader, config: ServeConfig) -> str:
    """Makes a leader listen. Returns a line for the operator: where, and what the other hosts run. Raises
    ListenError."""
    address = Address(config.master_addr, config.master_port)
    try:
        await leader.open()
    except OSError as error:
        why = error.strerror or str(error)
        raise ListenError(
            f"--master-addr and --master-port {address}: cannot listen there ({why}); choose an address of this "
            "machine and a free port"
        ) from error
    host = socket.gethostname() if config.master_addr in _ANYWHERE else config.master_addr
    command = ["penstock", "worker", "--join", Address(host).with_port(leader.port)]
    if config.join_token_file is not None:
        command += ["--join-token-file", "FILE"]
    if config.join_tls_ca is not None:
        command += ["--join-tls-ca", "FILE", "--join-tls-cert", "FILE", "--join-tls-key", "FILE"]
    others = "the other host" if config.nnodes == 2 else f"each of the {config.nnodes - 1} other hosts"
    if config.distributed_executor_backend == "ray":
        return f"waits for other hosts on {address.with_port(leader.port)}; Ray starts penstock worker on {others}"
    return f"waits for other hosts on {address.with_port(leader.port)}; on {others} run: {shlex.join(command)}"
