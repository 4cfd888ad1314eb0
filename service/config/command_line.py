"""The command line of ``penstock serve``: its help, and how flags, the environment and a file go together."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.service.config.flags import ConfigError, FlagParser, read_environment, read_file
from penstock.service.config.serve_config import ServeConfig

PROGRAM = "penstock serve"
PREFIX = "PENSTOCK_SERVE_"
"""The beginning of the environment variables that set flags."""
_FLAGS_LISTED = f"{PROGRAM} --help lists them"

_EPILOG = """\
examples:
  penstock serve                               the built-in demo model on 127.0.0.1:50051
  penstock serve Qwen/Qwen3-0.6B --port 8033   a model on the Hugging Face Hub, downloaded if not cached
  penstock serve ./my-model --listen unix:/run/penstock.sock --max-model-len 4096
  penstock serve --http-port 8000              also OpenAI's API and a chat page, at http://127.0.0.1:8000
  penstock serve --config serve.yaml           flags from a file; the command line overrides them
  PENSTOCK_SERVE_MAX_NUM_SEQS=64 penstock serve    a flag from the environment, which overrides the file
  penstock serve --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}'

a configuration file has the flags' names as keys:
  model: ./my-model
  max-num-seqs: 64
  enable-prefix-caching: true

a file of API keys has one line per key, with its hash and its tenant; give act-for-others to a gateway's key, admin to
an operator's:
  echo "sha256:$(printf %s "$KEY" | sha256sum | cut -c-64) some-tenant" >> keys
  echo "sha256:$(printf %s "$GATEWAY_KEY" | sha256sum | cut -c-64) gateway act-for-others" >> keys
  echo "sha256:$(printf %s "$OPERATOR_KEY" | sha256sum | cut -c-64) operators admin" >> keys

a file of tenants has one key per tenant, and default for all others:
  default: {max-live-requests: 200}
  some-tenant: {weight: 4, max-prompt-tokens: 8000, max-tokens: 1000}
  another: {requests-per-second: 5, tokens-per-minute: 100000}

TLS with client certificates, and tokens of an identity provider in addition to keys:
  penstock serve --host 0.0.0.0 --tls-cert server.pem --tls-key server.key --tls-client-ca clients-ca.pem
  penstock serve --api-keys-file keys --jwt-jwks-file jwks.json --jwt-issuer https://id.example --jwt-audience penstock

environment: PENSTOCK_SERVE_<FLAG> sets any flag, with _ for each -, and PENSTOCK_SERVE_CONFIG names a file;
HF_HOME and HF_TOKEN for the hub, HF_HUB_OFFLINE=1 to use only the cache;
OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 sends traces and metrics there.
"""


_RIVALS = ("kv_cache_memory_bytes", "gpu_memory_utilization")
"""If a source sets only one of the two, the other one is ignored in the sources that come after it."""


def parse_config(arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> ServeConfig:
    """Returns the configuration of a command line, of the variables in ``environment``, and of the file that one of
    them names; the first of these that sets a flag counts. Raises ConfigError; ``--help`` prints, and raises
    SystemExit."""
    given = vars(make_parser().parse_args(arguments))
    from_environment, file = read_environment(environment, PREFIX, ServeConfig, _FLAGS_LISTED)
    file = given.pop("config", file)
    named = given.pop("model_flag", None)
    if named is not None:
        if "model" in given:
            raise ConfigError(f"--model: the model is given twice, as {given['model']!r} too; leave one of them out")
        given["model"] = named
    values = {} if file is None else read_file(Path(file), ServeConfig, _FLAGS_LISTED)
    return ServeConfig(**_overridden(_overridden(values, from_environment), given))


def _overridden(values: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with those of ``by``, and without flags that contradict these."""
    ignored = {"listen"} if by.keys() & {"host", "port"} else set()
    if "listen" in by:
        ignored |= {"host", "port"}
    if len(by.keys() & set(_RIVALS)) == 1:
        ignored |= set(_RIVALS)
    return {name: value for name, value in values.items() if name not in ignored} | by


def make_parser() -> FlagParser:
    """Defines the flags."""
    parser = FlagParser(
        _FLAGS_LISTED,
        prog=PROGRAM,
        usage=f"{PROGRAM} [MODEL] [FLAGS]",
        description="Serves a model over gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_fields(ServeConfig, "model")
    return parser
