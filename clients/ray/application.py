"""Builds the application from the arguments of ``serve run`` or of a configuration file.

An argument is an option of Ray Serve if it has the name of one; all others are flags of ``penstock serve``.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from penstock.clients.errors import InvalidOption

if TYPE_CHECKING:
    from ray.serve import Application

DEPLOYMENT = "penstock"
"""The deployment's name, for the section ``deployments`` of a configuration file."""
_SERVE_OPTIONS = frozenset(
    {
        "autoscaling_config", "graceful_shutdown_timeout_s", "health_check_period_s", "health_check_timeout_s",
        "max_ongoing_requests", "max_replicas_per_node", "num_replicas", "ray_actor_options",
    }
)  # fmt: skip
_LISTENERS = frozenset({"config", "host", "http_host", "http_port", "listen", "port"})
_TLS = frozenset({"tls_cert", "tls_client_ca", "tls_key"})
_MAX_NUM_SEQS = 256
"""The default of the flag ``--max-num-seqs``."""
_STOP_TIMEOUT_S = 60.0
"""How long running requests may take when a replica stops. Serve's default of 20 s is shorter than many answers."""


def app(args: dict[str, Any]) -> "Application":
    """Returns the application. Raises InvalidOption."""
    from ray import serve  # this module can be imported without the extra

    from penstock.clients.ray.replica import ServeReplica

    given = {name.replace("-", "_"): value for name, value in args.items()}
    options = {name: _parsed(given.pop(name)) for name in sorted(_SERVE_OPTIONS & given.keys())}
    resources = {name: _parsed(given.pop(name)) for name in ("num_cpus", "num_gpus") if name in given}  # shorthands
    _check(given)
    options["ray_actor_options"] = {**options.get("ray_actor_options", {}), **resources}
    options.setdefault("graceful_shutdown_timeout_s", _STOP_TIMEOUT_S)
    options.setdefault("max_ongoing_requests", _max_num_seqs(given))
    flags = {**_flags_for(options["ray_actor_options"]), **given}
    deployment = serve.deployment(name=DEPLOYMENT, **options)(ServeReplica)
    return deployment.bind(list(serve_arguments(flags)), float(options["graceful_shutdown_timeout_s"]))


def serve_arguments(flags: Mapping[str, object]) -> Iterator[str]:
    """Yields flags as arguments of ``penstock serve``, such as ``--max-num-seqs=64`` for ``max_num_seqs=64``. A switch
    is true or false, also as text; None leaves a flag out."""
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, Mapping):
            yield f"--{flag}={json.dumps(value)}"
        elif value is not None:
            yield f"--{flag}={value}"


def _max_num_seqs(flags: Mapping[str, object]) -> int:
    given = flags.get("max_num_seqs")
    text = str(_MAX_NUM_SEQS if given is None else given)
    if not (text.isdecimal() and int(text)):
        raise InvalidOption("max_num_seqs", "must be a positive integer")
    return int(text)


def _parsed(value: object) -> Any:
    """Returns an option's value. On the command line it is YAML."""
    return yaml.safe_load(value) if isinstance(value, str) else value


def _check(flags: Mapping[str, object]) -> None:
    """Raises InvalidOption for flags that a replica sets itself."""
    if taken := sorted(_LISTENERS & flags.keys()):
        raise InvalidOption(taken[0], "every replica listens on free ports of 127.0.0.1; omit it")
    if taken := sorted(_TLS & flags.keys()):
        raise InvalidOption(
            taken[0], "Ray Serve's proxies end the clients' connections; configure TLS in front of them"
        )


def _flags_for(resources: Mapping[str, Any]) -> dict[str, object]:
    """Returns the flags by which ``penstock serve`` uses the resources that Ray reserves for a replica."""
    num_gpus, num_cpus = int(resources.get("num_gpus", 0)), int(resources.get("num_cpus", 0))
    if num_gpus:
        return {"tensor_parallel_size": num_gpus} if num_gpus > 1 else {}
    return {"threads": num_cpus} if num_cpus else {}
