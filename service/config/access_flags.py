"""The flags of the model and of the ways in which clients reach it: listeners, TLS and authentication."""

# ruff: noqa: RUF009 - flag returns a dataclasses.field

from dataclasses import dataclass
from pathlib import Path

from penstock.service.chat_templates.renderers import DEFAULT_TIMEOUT_S
from penstock.service.config.flags import flag
from penstock.service.config.limits import MAX_CONNECTIONS
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import AUTO, NONE
from penstock.service.parsers.tool_formats import TOOL_FORMATS


@dataclass(frozen=True, kw_only=True)
class AccessFlags:
    """The first groups of the flags of ``penstock serve``; ``ServeConfig`` has the others and checks all."""

    model: str = flag(
        "demo",
        "a directory in Hugging Face's layout, a GGUF file, the id of a model on the Hugging Face Hub, or demo",
        group="the model",
    )
    revision: str | None = flag(
        None, "the branch, tag or commit of a model on the hub; only a commit always refers to the same files",
        metavar="NAME", shown="the main branch",
    )  # fmt: skip
    gguf_file: str | None = flag(
        None, "the name of a GGUF file in that directory or repository, or of the first of its parts",
        metavar="NAME", shown="none: the model is in Hugging Face's layout",
    )  # fmt: skip
    served_model_name: str | None = flag(
        None, "the model's name for clients", metavar="NAME", shown="the id on the hub, or the last part of the path"
    )
    generation_config: str = flag(
        AUTO, "sampling defaults of requests: auto for the model's generation_config.json, none for no defaults, or "
        "the path of such a file or its directory; the max_new_tokens of a file given here is a limit for every "
        "request",
        metavar="auto|none|PATH",
    )  # fmt: skip
    override_generation_config: str | None = flag(
        None, 'sampling defaults that override those of --generation-config, such as {"temperature": 0.6}; a '
        'max_new_tokens here is a limit for every request', metavar="JSON", shown="none", is_json=True,
    )  # fmt: skip
    chat_template: Path | None = flag(
        None, "a Jinja chat template, or the name of one of the model's own", metavar="FILE|NAME",
        shown="the model's own",
    )  # fmt: skip
    chat_template_timeout: float = flag(
        DEFAULT_TIMEOUT_S, "CPU time that the chat template may use for one conversation; a request that needs more "
        "fails", metavar="SECONDS", low=0.01, high=600,
    )  # fmt: skip
    max_model_len: int | None = flag(
        None, "limit on the tokens of prompt and output together", metavar="N", low=2, high=1 << 24,
        shown="the model's own, or what the KV cache holds",
    )  # fmt: skip
    pooling: str | None = flag(
        None, "the hidden states that form an embedding: the last token's, the mean of all, or the first token's",
        choices=["last", "mean", "cls"], shown="from the model's 1_Pooling/config.json, or last",
    )  # fmt: skip
    score_tokens: str | None = flag(
        None, "two tokens of a reranker without a classification head: the first for a document that is irrelevant, "
        "the second for one that is relevant, such as no,yes", metavar="TOKEN,TOKEN", shown="none",
    )  # fmt: skip
    host: str | None = flag(
        None, "the address to listen on; 0.0.0.0 is every IPv4 address", shown="127.0.0.1", group="listeners"
    )
    port: int | None = flag(None, "the port to listen on; 0 is any free port", shown="50051", low=0, high=65535)
    listen: str | None = flag(
        None, "host and port together, or a Unix socket", metavar="HOST:PORT|unix:PATH", shown="--host and --port"
    )
    admin_listen: str | None = flag(
        None, "the admin listener; an address that other machines can reach requires --api-keys-file",
        metavar="HOST:PORT|unix:PATH|off", shown="the next port on 127.0.0.1, or the Unix socket PATH.admin",
    )  # fmt: skip
    metrics_listen: str | None = flag(
        None, "the listener for Prometheus, with metrics at /metrics", metavar="HOST:PORT|off",
        shown="two ports after the service's, on 127.0.0.1; off with a Unix socket",
    )  # fmt: skip
    max_connections: int = flag(
        MAX_CONNECTIONS, "limit on open gRPC connections; lower if the limit on open files requires it. Idle ones "
        "are closed to make room for new ones", metavar="N", low=1, high=1 << 20,
    )  # fmt: skip
    contracts: str | None = flag(
        None, "contracts of other engines to serve too, separated by commas: kserve, the Open Inference Protocol of "
        "KServe and Triton; openengine, which Dynamo calls; vllm, which the gateway smg calls",
        metavar="NAMES", shown="none",
    )  # fmt: skip
    http_port: int | None = flag(
        None, "the port of OpenAI's API over HTTP, or HTTPS with --tls-cert, in a child process; 0 is any free port",
        shown="no HTTP", low=0, high=65535,
    )  # fmt: skip
    http_host: str | None = flag(
        None, "the address of OpenAI's API; 0.0.0.0 is every IPv4 address", metavar="HOST", shown="127.0.0.1"
    )
    admin_http_port: int | None = flag(
        None, "the port of the status page for operators, with HTTPS if --tls-cert is given, in a child process",
        shown="no status page", low=0, high=65535,
    )  # fmt: skip
    admin_http_host: str | None = flag(
        None, "the address of the status page; one that other machines can reach requires --api-keys-file",
        metavar="HOST", shown="127.0.0.1",
    )  # fmt: skip
    tool_call_parser: str = flag(
        AUTO, "the format of the model's tool calls; auto detects it from the chat template",
        choices=[AUTO, NONE, *TOOL_FORMATS],
    )  # fmt: skip
    reasoning_parser: str = flag(
        AUTO, "the format of the model's reasoning; auto detects it from the chat template",
        choices=[AUTO, NONE, *REASONING_FORMATS],
    )  # fmt: skip
    allowed_origins: str | None = flag(
        None, "origins whose web pages may call OpenAI's API, separated by commas; * is any origin",
        metavar="ORIGINS", shown="none",
    )  # fmt: skip
    allowed_hosts: str | None = flag(
        None, "additional host names for HTTP and metrics, separated by commas; *.example.com is every name below "
        "it, * is any name. Requests with any other Host are refused for metrics, and for HTTP if callers need no key",
        metavar="NAMES", shown="addresses, names without a dot and this machine's name",
    )  # fmt: skip
    enable_lora_routes: bool = flag(
        False, "serve vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter over HTTP, for callers whose key may "
        "administer, or for all if there are no keys",
    )  # fmt: skip
    unknown_fields: str = flag(
        "refuse", "what OpenAI's API does with unknown fields; ignored ones are logged and counted",
        choices=["refuse", "ignore"],
    )  # fmt: skip
    sse_keep_alive: int = flag(
        15, "a stream of OpenAI's API that is idle for this long sends a blank line, for proxies; 0 sends none",
        metavar="SECONDS", low=0, high=3600,
    )  # fmt: skip
    responses_file: Path | None = flag(
        None, "the file of SQLite that keeps stored responses of OpenAI's API when the service restarts",
        metavar="FILE", shown="in memory only",
    )  # fmt: skip
    responses_ttl: int = flag(
        86_400, "how long OpenAI's API stores a response; 0 stores none", metavar="SECONDS", low=0, high=31_536_000
    )
    responses_mib: int = flag(
        128, "memory for all stored responses of OpenAI's API", metavar="MIB", low=1, high=1 << 20
    )
    tls_cert: Path | None = flag(
        None, "the service's certificate and intermediate certificates, in PEM", metavar="FILE",
        shown="no TLS", group="TLS and authentication; changed files are reloaded",
    )  # fmt: skip
    tls_key: Path | None = flag(None, "the certificate's private key, in PEM", metavar="FILE", shown="none")
    tls_client_ca: Path | None = flag(
        None,
        "CA certificates, in PEM; callers need a certificate signed by one of them",
        metavar="FILE",
        shown="no client certificates",
    )
    api_keys_file: Path | None = flag(
        None, "hashes of API keys with their tenants, one line per key: sha256:HEX TENANT", metavar="FILE",
        shown="without keys and tokens, all callers are one tenant",
    )  # fmt: skip
    jwt_jwks_file: Path | None = flag(
        None, "public keys of JSON web tokens: RS256, ES256 or EdDSA", metavar="FILE", shown="no tokens"
    )
    jwt_jwks_url: str | None = flag(
        None, "an https URL with such keys, which is fetched every 5 minutes", metavar="URL", shown="no tokens"
    )
    jwt_issuer: str | None = flag(None, "required iss of a token", metavar="NAME", shown="none")
    jwt_audience: str | None = flag(None, "required aud of a token, or one of its values", metavar="NAME", shown="none")
    jwt_tenant_claim: str = flag("tenant", "the claim that names a token's tenant", metavar="NAME")
    jwt_rights_claim: str = flag(
        "scope", "the claim with a token's rights, penstock:act-for-others and penstock:admin", metavar="NAME"
    )
    jwt_leeway: float = flag(
        30.0, "allowed difference between the clocks of issuer and service", metavar="SECONDS", low=0, high=300
    )
    tenants_file: Path | None = flag(
        None, "weights, caps and rate limits of tenants, in YAML", metavar="FILE", shown="equal weights and no caps"
    )
