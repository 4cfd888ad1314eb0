"""Checks the flags for listeners, TLS, keys and tokens that exclude or need each other."""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clients.gateway.origins import read_origins
from penstock.clients.host.allowed_hosts import read_hosts
from penstock.clients.host.routing_headers import read_objectives
from penstock.service.config.addresses import Address
from penstock.service.config.flags import ConfigError
from penstock.service.config.sampling_defaults import check_override
from penstock.service.config.speculative import parse_speculation

if TYPE_CHECKING:
    from penstock.service.config.serve_config import ServeConfig


def check_listeners(config: "ServeConfig") -> None:
    """Raises ConfigError for invalid hosts, and for flags that exclude or need each other."""
    _check_host("--host", config.host, "--port", "--listen")
    _check_host("--http-host", config.http_host, "--http-port")
    _check_host("--admin-http-host", config.admin_http_host, "--admin-http-port")
    if config.listen is not None and (config.host is not None or config.port is not None):
        raise ConfigError("--listen: already sets the host and the port; leave --host and --port out")
    for flag, host, port in (
        ("http", config.http_host, config.http_port),
        ("admin-http", config.admin_http_host, config.admin_http_port),
    ):
        if host is not None and port is None:
            raise ConfigError(f"--{flag}-host: needs --{flag}-port as well: give that too, or leave --{flag}-host out")


def _check_host(flag: str, host: str | None, port_flag: str, or_socket: str = "") -> None:
    """Raises ConfigError for an invalid host. ``or_socket`` is the flag that accepts a Unix socket, if any."""
    if host is None:
        return
    if host.startswith("unix:") and or_socket:
        raise ConfigError(f"{flag}: must be a host; for a Unix socket, give {or_socket} {host} instead")
    if not host or (":" in host and not _is_ipv6(_bare(host))):
        raise ConfigError(f"{flag}: must be a host name or an IP address, and {port_flag} the port; it is {host!r}")


def host_port(host: str | None, port: int) -> str:
    """Returns ``host:port``, with an IPv6 address in brackets. The default host is this machine."""
    return str(Address(_bare(host or "127.0.0.1"), port))


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def read_score_tokens(text: str) -> tuple[str, str]:
    """Returns the two tokens of --score-tokens. Raises ConfigError."""
    no, _, yes = text.partition(",")
    if not no or not yes or no == yes:
        raise ConfigError(f"--score-tokens: must be two different tokens, such as no,yes; it is {text!r}")
    return no, yes


def check_texts(config: "ServeConfig") -> None:
    """Raises ConfigError for invalid flags whose text has a format of its own."""
    texts: tuple[tuple[str, str | None, Callable[[str], object]], ...] = (
        ("--allowed-origins", config.allowed_origins, read_origins),
        ("--allowed-hosts", config.allowed_hosts, read_hosts),
        ("--objectives", config.objectives, read_objectives),
    )
    for flag_name, text, read in texts:
        try:
            if text is not None:
                read(text)
        except ValueError as error:
            raise ConfigError(f"{flag_name}: {error}") from None
    if config.speculative_config is not None:
        parse_speculation(config.speculative_config)
    if config.score_tokens is not None:
        read_score_tokens(config.score_tokens)
    if config.override_generation_config is not None:
        check_override(config.override_generation_config)
    if config.responses_file is not None and not config.responses_ttl:
        raise ConfigError("--responses-file: not with --responses-ttl 0, which stores nothing; leave one of them out")
    if config.kv_events is not None and not config.enable_prefix_caching:
        raise ConfigError("--kv-events-config: needs prefix caching; leave --no-enable-prefix-caching out, or this one")


def check_identity(config: "ServeConfig") -> None:
    """Raises ConfigError for flags for TLS and tokens that exclude or need each other."""
    if (config.tls_cert is None) != (config.tls_key is None):
        flag_name, other = ("--tls-key", "--tls-cert") if config.tls_cert is None else ("--tls-cert", "--tls-key")
        raise ConfigError(f"{flag_name}: needs {other} as well: set both or neither")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-client-ca: needs --tls-cert and --tls-key as well")
    if config.tls_cert is not None and config.address.startswith("unix:"):
        raise ConfigError(
            "--tls-cert: a Unix socket has no TLS; leave --tls-cert and --tls-key out, or listen on HOST:PORT"
        )
    for flag_name, port in (("--http-port", config.http_port), ("--admin-http-port", config.admin_http_port)):
        if config.tls_client_ca is not None and port is not None and not config.has_credentials:
            raise ConfigError(
                f"{flag_name}: --tls-client-ca does not apply to HTTP, where anyone could call; give --api-keys-file "
                f"or --jwt-jwks-file too, or leave {flag_name} out"
            )
    _check_tokens(config)


def _check_tokens(config: "ServeConfig") -> None:
    if config.jwt_jwks_file is not None and config.jwt_jwks_url is not None:
        raise ConfigError("--jwt-jwks-url: the keys come from --jwt-jwks-file already; leave one of them out")
    if config.jwt_jwks_url is not None and not re.match(r"https://[^/?#@\s]+(/\S*)?$", config.jwt_jwks_url):
        raise ConfigError(
            f"--jwt-jwks-url: must be a URL such as https://id.example/jwks.json; it is {config.jwt_jwks_url!r}"
        )
    source = "--jwt-jwks-url" if config.jwt_jwks_file is None else "--jwt-jwks-file"
    has_keys = config.jwt_jwks_file is not None or config.jwt_jwks_url is not None
    if has_keys and not (config.jwt_issuer and config.jwt_audience):
        missing = [name for name in ("issuer", "audience") if not getattr(config, f"jwt_{name}")]
        raise ConfigError(f"{source}: needs {' and '.join(f'--jwt-{name}' for name in missing)} as well")
    if not has_keys and (config.jwt_issuer or config.jwt_audience):
        given = "--jwt-issuer" if config.jwt_issuer else "--jwt-audience"
        raise ConfigError(f"{given}: needs --jwt-jwks-file or --jwt-jwks-url as well, with the keys that sign tokens")


def check_memory(config: "ServeConfig") -> None:
    """Raises ConfigError for flags of the KV cache that exclude or need each other."""
    if config.kv_cache_memory_bytes is not None and config.gpu_memory_utilization is not None:
        raise ConfigError(
            "--kv-cache-memory-bytes: already sets the KV cache's size; leave --gpu-memory-utilization out"
        )
    if config.host_kv_cache_bytes and not config.enable_prefix_caching:
        raise ConfigError(
            "--host-kv-cache-bytes: needs prefix caching; leave --no-enable-prefix-caching out, or this one"
        )


def read_lora_modules(text: str) -> dict[str, str]:
    """Returns the absolute paths of adapters, by name, of --lora-modules. Raises ConfigError."""
    paths: dict[str, str] = {}
    for part in text.split(","):
        name, _, path = (piece.strip() for piece in part.partition("="))
        if not name or not path:
            raise ConfigError(f"--lora-modules: must be NAME=PATH, or several separated by commas; {part!r} is not")
        if name in paths:
            raise ConfigError(f"--lora-modules: {name} occurs twice; give each adapter a name of its own")
        paths[name] = str(Path(path).expanduser().absolute())
    return paths


def check_adapters(config: "ServeConfig") -> None:
    """Raises ConfigError for flags of LoRA adapters that exclude or need each other."""
    flag_name = "--max-loras" if config.lora_modules is None else "--lora-modules"
    if config.lora_modules is not None:
        read_lora_modules(config.lora_modules)
        if not config.num_adapter_slots:
            raise ConfigError("--lora-modules: needs room for adapters; leave --max-loras 0 out")
        if config.model_name in config.adapters:
            raise ConfigError(f"--lora-modules: {config.model_name} is the model's own name; choose another")
    if config.enable_lora_routes and (config.http_port is None or not config.num_adapter_slots):
        needed = "--http-port" if config.http_port is None else "--max-loras"
        raise ConfigError(f"--enable-lora-routes: needs {needed} as well")
    if not config.num_adapter_slots:
        return
    others = (
        (config.tensor_parallel_size > 1, "--tensor-parallel-size"),
        (config.pipeline_parallel_size > 1, "--pipeline-parallel-size"),
        (config.backend == "transformers", "--backend transformers"),
    )
    for is_given, other in others:
        if is_given:
            raise ConfigError(f"{flag_name}: LoRA adapters do not work with {other}; leave one of the two out")
