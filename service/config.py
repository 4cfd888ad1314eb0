"""What an operator says of a service: frozen, complete, checked once; from the command line, a file, or Python.

Flags are named as vLLM's where vLLM has them. Nothing here touches the model, the port or the machine.
"""

# ruff: noqa: RUF009 - what _flag returns is a dataclasses.field

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml

PROGRAM = "penstock serve"
_FLAGS_LISTED = f"{PROGRAM} --help lists them"

_EPILOG = """\
examples:
  penstock serve                               the built-in demo model on 127.0.0.1:50051
  penstock serve Qwen/Qwen3-0.6B --port 8033   a model of the Hugging Face hub, fetched if it is not in the cache
  penstock serve ./my-model --listen unix:/run/penstock.sock --max-model-len 4096
  penstock serve --config serve.yaml           flags from a file; those on the command line go first

a configuration file has the flags' names as keys:
  model: ./my-model
  max-num-seqs: 64
  enable-prefix-caching: true

a file of API keys has a line for each key, its hash and its tenant; act-for-others is for a gateway's, admin for an
operator's:
  echo "sha256:$(printf %s "$KEY" | sha256sum | cut -c-64) some-tenant" >> keys
  echo "sha256:$(printf %s "$GATEWAY_KEY" | sha256sum | cut -c-64) gateway act-for-others" >> keys
  echo "sha256:$(printf %s "$OPERATOR_KEY" | sha256sum | cut -c-64) operators admin" >> keys

a file of tenants has a key for each, and default for all others:
  default: {max-live-requests: 200}
  some-tenant: {weight: 4, max-prompt-tokens: 8000, max-tokens: 1000}

environment: HF_HOME and HF_TOKEN for the hub, HF_HUB_OFFLINE=1 to keep off it;
OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 sends traces there.
"""


_RIVALS = (
    ("kv_cache_memory_bytes", "gpu_memory_utilization"),
    ("gpu_memory_utilization", "kv_cache_memory_bytes"),
)
"""Where the command line has the first, the file's second does not count."""
_DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,3})?")


class ConfigError(Exception):
    """A flag, a key or its value is wrong. The text is one line that names it and says what would be right."""


def _flag(
    default: Any, text: str, *, metavar: str | None = None, low: float | None = None, high: float | None = None,
    choices: Sequence[str | int] | None = None, shown: str | None = None, is_size: bool = False, group: str = "",
) -> Any:  # fmt: skip
    """A field with what its flag needs: bounds that include their ends, and ``shown`` as the default in the help, where
    ``group`` begins a group of flags."""
    return dataclasses.field(
        default=default,
        metadata={
            "help": text, "metavar": metavar, "low": low, "high": high, "choices": choices, "shown": shown,
            "is_size": is_size, "group": group,
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The flags of ``penstock serve``. Raises ConfigError where a value is out of bounds."""

    model: str = _flag(
        "demo", "a directory in Hugging Face's layout, the id of a model on the hub, or demo", group="the model"
    )
    served_model_name: str | None = _flag(
        None, "the model's name for clients", metavar="NAME", shown="a hub's id, or the last part of a path"
    )
    chat_template: Path | None = _flag(None, "a Jinja chat template", metavar="FILE", shown="the model's own")
    max_model_len: int | None = _flag(
        None, "the most tokens of prompt and output together", metavar="N", low=2, high=1 << 24, shown="the model's own"
    )
    host: str | None = _flag(
        None,
        "the address to listen on; 0.0.0.0 is every IPv4 one",
        shown="127.0.0.1",
        group="where it listens, and who may call",
    )
    port: int | None = _flag(None, "the port to listen on; 0 is any free one", shown="50051", low=0, high=65535)
    listen: str | None = _flag(
        None, "host and port in one, or a Unix socket", metavar="HOST:PORT|unix:PATH", shown="by --host and --port"
    )
    admin_listen: str | None = _flag(
        None, "where the service is administered; what other machines can reach wants --api-keys-file",
        metavar="HOST:PORT|unix:PATH|off", shown="127.0.0.1 and the next port, or beside the socket PATH.admin",
    )  # fmt: skip
    api_keys_file: Path | None = _flag(
        None, "API keys' hashes and tenants, a line each: sha256:HEX TENANT", metavar="FILE",
        shown="everyone is one tenant",
    )  # fmt: skip
    tenants_file: Path | None = _flag(
        None, "tenants' weights and caps, in YAML", metavar="FILE", shown="all weigh the same and have no cap"
    )
    device: str = _flag(
        "auto",
        "where the model runs: cpu, cuda, cuda:1; auto is a GPU if there is one",
        metavar="NAME",
        group="what computes",
    )
    backend: str = _flag(
        "auto",
        "what computes: cpu is the C++ library, reference is plain torch; auto is the fastest that can run the model",
        choices=["auto", "cpu", "reference"],
    )
    dtype: str = _flag(
        "auto",
        "the type of weights and activations; auto is the checkpoint's, but on the backend cpu, which has bfloat16 and "
        "float32 alone, bfloat16 for float16 and float32 for float64",
        choices=["auto", "float32", "bfloat16", "float16", "float64"],
    )
    quantization: str = _flag(
        "none", "int8 and int4 quantise the weights of a float checkpoint as they are read; the others say what the "
        "checkpoint already is", choices=["none", "int8", "int4", "gptq", "awq", "compressed-tensors"],
    )  # fmt: skip
    load_format: str = _flag(
        "auto", "auto reads safetensors; dummy makes weights up, to measure with", choices=["auto", "dummy"]
    )
    threads: int | None = _flag(
        None, "threads that compute, on a CPU", metavar="N", low=1, high=1024, shown="the cores that may be used"
    )
    block_size: int = _flag(16, "tokens in a block of the KV cache", metavar="N", choices=[16], group="the KV cache")
    kv_cache_dtype: str = _flag(
        "auto", "the type of the KV cache; auto is that of the activations", choices=["auto", "int8"]
    )
    enable_prefix_caching: bool = _flag(True, "keep the KV of prompts for requests that begin alike")
    gpu_memory_utilization: float | None = _flag(
        None, "the KV cache's share of what is free after the weights are loaded, unlike vLLM's, which is of all "
        "memory and includes the weights", metavar="SHARE", low=0.01, high=1.0,
        shown="0.9 of a GPU's, 0.5 of the machine's",
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = _flag(
        None, "the KV cache's size; K, M, G are powers of 1024", metavar="BYTES", low=1, is_size=True,
        shown="by --gpu-memory-utilization",
    )  # fmt: skip
    conversation_ttl: float = _flag(
        600.0, "how long a request that ended may be continued, and how long its KV is retained for that",
        metavar="SECONDS", low=0, high=86_400,
    )  # fmt: skip
    conversation_tokens: int = _flag(
        1_000_000, "tokens of each tenant's contexts that are kept to be continued; all tenants together have 16 times "
        "that; a token takes 6 bytes", metavar="N", low=0, high=1 << 32,
    )  # fmt: skip
    scheduling_policy: str = _flag(
        "fcfs",
        "who goes first: fcfs as they come, priority the lowest start.priority, deadline what has the least time left, "
        "fair the tenant that was served least for its weight",
        choices=["fcfs", "priority", "deadline", "fair"],
        group="scheduling",
    )
    target_itl: float = _flag(
        0.0, "the time between a stream's tokens that prompts beside it may not exceed: they are computed in chunks "
        "that fit", metavar="MS", low=0, high=60_000, shown="none, as --max-num-batched-tokens allows",
    )  # fmt: skip
    max_num_seqs: int = _flag(
        256, "sequences in a step at most, as far as it has tokens for them", metavar="N", low=1, high=4096
    )
    max_num_batched_tokens: int | None = _flag(
        None, "tokens in a step at most", metavar="N", low=1, high=1 << 20,
        shown="2048; on the backend cpu what takes about 0.1 s, 64 to 256",
    )  # fmt: skip
    max_queued_requests: int = _flag(1024, "requests that may wait; more are refused", metavar="N", low=1, high=1 << 20)
    max_queued_tokens: int = _flag(
        4_000_000, "prompt tokens that may wait; more are refused", metavar="N", low=1, high=1 << 32
    )
    explain_requests: int = _flag(
        1000,
        "requests that ended and that penstock explain still knows",
        metavar="N",
        low=0,
        high=100_000,
        group="operation",
    )
    drain_delay: float = _flag(
        0.0,
        "after SIGTERM: how long new requests are still taken while health says NOT_SERVING, for balancers to notice",
        metavar="SECONDS",
        low=0,
        high=3600,
    )
    shutdown_grace: float = _flag(
        30.0, "what running requests have to finish after SIGTERM", metavar="SECONDS", low=0, high=86_400
    )
    log_level: str = _flag("info", "what is logged", choices=["debug", "info", "warning", "error"])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check(field, value)
        if self.listen is not None and (self.host is not None or self.port is not None):
            raise ConfigError("--listen: already says where; leave --host and --port out")
        if self.kv_cache_memory_bytes is not None and self.gpu_memory_utilization is not None:
            raise ConfigError("--kv-cache-memory-bytes: already says how much; leave --gpu-memory-utilization out")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device: must be auto, cpu, cuda or cuda:N; it is {self.device!r}")
        if not self.model:
            raise ConfigError("MODEL: is empty; give a directory, an id on the hub, or demo")

    @property
    def address(self) -> str:
        """Where to listen: ``host:port`` or ``unix:PATH``."""
        if self.listen is not None:
            return self.listen
        host = self.host if self.host is not None else "127.0.0.1"
        return f"{f'[{host}]' if ':' in host else host}:{50051 if self.port is None else self.port}"

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        # A hub's id keeps its owner; of a path, the last part says enough.
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() or path.is_absolute() else self.model


def parse_config(arguments: Sequence[str]) -> ServeConfig:
    """The configuration of a command line. Raises ConfigError; ``--help`` raises SystemExit, after it printed."""
    given = vars(_parser().parse_args(arguments))
    file = given.pop("config", None)
    named = given.pop("model_flag", None)
    if named is not None:
        if "model" in given:
            raise ConfigError("--model: MODEL is there already; give one of them")
        given["model"] = named
    values = {} if file is None else _read_file(Path(file))
    if given.keys() & {"host", "port"}:
        values.pop("listen", None)
    for one, other in _RIVALS:
        if one in given and other not in given:
            values.pop(other, None)
    if "listen" in given:
        values.pop("host", None)
        values.pop("port", None)
    return ServeConfig(**{**values, **given})


def _read_file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is no YAML ({' '.join(str(error).split())}); correct it") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must hold keys and values, such as port: 50051")
    fields = {_name(field): field for field in dataclasses.fields(ServeConfig)}
    values = {}
    for key, value in loaded.items():
        field = fields.get(f"--{str(key).replace('_', '-')}")
        if field is None:
            raise ConfigError(f"--config {path}: {key} is no flag; {_FLAGS_LISTED}")
        try:
            values[field.name] = _from_file(field, value)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"--config {path}: {key}: {error}") from None
    return values


def _from_file(field: "dataclasses.Field[Any]", value: object) -> Any:
    if bool in _types(field) or isinstance(value, bool):
        if isinstance(value, bool) and bool in _types(field):
            return value
        raise ConfigError(f"must be {'true or false' if bool in _types(field) else _wanted(field)}; it is {value!r}")
    if not isinstance(value, str | int | float):
        raise ConfigError(f"must be {_wanted(field)}; it is {value!r}")
    return _parse(field, str(value))


def _parse(field: "dataclasses.Field[Any]", text: str) -> Any:
    """A value from its text. Raises ConfigError."""
    types = _types(field)
    try:
        if field.metadata["is_size"]:
            return _size(text)
        for kind in (int, float):
            if kind in types:
                return kind(text)
    except ValueError:
        raise ConfigError(f"must be {_wanted(field)}; it is {text!r}") from None
    return Path(text).expanduser() if Path in types else text


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    kinds = (*_types(field), int) if float in _types(field) else _types(field)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{_name(field)}: must be {_wanted(field)}; it is {value!r}")
    low, high, choices = (field.metadata[name] for name in ("low", "high", "choices"))
    below, above = low is not None and not value >= low, high is not None and not value <= high
    if below or above:
        bounds = f"{low:,} to {high:,}" if high is not None else f"at least {low:,}"
        raise ConfigError(f"{_name(field)}: must be {bounds}; it is {value:,}")
    if choices is not None and value not in choices:
        raise ConfigError(f"{_name(field)}: must be {_one_of(choices)}; it is {value!r}")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KMGT]?)(iB|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def _types(field: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    return tuple(kind for kind in get_args(field.type) or (field.type,) if kind is not type(None))


def _wanted(field: "dataclasses.Field[Any]") -> str:
    if field.metadata["choices"] is not None:
        return _one_of(field.metadata["choices"])
    if field.metadata["is_size"]:
        return "a number of bytes, such as 512M"
    if bool in _types(field):
        return "true or false"
    kinds = {int: "a whole number", float: "a number", Path: "a path"}
    return next((text for kind, text in kinds.items() if kind in _types(field)), "text")


def _one_of(choices: Sequence[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _name(field: "dataclasses.Field[Any]") -> str:
    return f"--{field.name.replace('_', '-')}"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        told = message.removeprefix("argument ")
        unknown = told.removeprefix("unrecognized arguments")
        raise ConfigError(told if unknown == told else f"no such flag or argument{unknown}; {_FLAGS_LISTED}")


def _parser() -> argparse.ArgumentParser:
    # Values that are not given stay out of the result, so that the file's show.
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [MODEL] [FLAGS]",
        description="Serves a model over gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(ServeConfig):
        if field.metadata["group"]:
            flags = parser.add_argument_group(field.metadata["group"])
        text = field.metadata["help"]
        shown = field.metadata["shown"] or field.default
        if field.name == "model":
            flags.add_argument("model", nargs="?", metavar="MODEL", help=f"{text} (default: {shown})")
            flags.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
        elif bool in _types(field):
            flags.add_argument(
                _name(field), action=argparse.BooleanOptionalAction, help=f"{text} (default: on)" if shown else text
            )
        else:
            choices = field.metadata["choices"]
            metavar = field.metadata["metavar"] or (f"{{{','.join(map(str, choices))}}}" if choices else None)
            flags.add_argument(_name(field), type=_Argument(field), metavar=metavar, help=f"{text} (default: {shown})")
    flags.add_argument("--config", metavar="FILE", help="a YAML file of flags (default: none)")
    return parser


class _Argument:
    """What argparse calls to read a flag's value."""

    def __init__(self, field: "dataclasses.Field[Any]") -> None:
        self._field = field

    def __call__(self, text: str) -> Any:
        try:
            return _parse(self._field, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
