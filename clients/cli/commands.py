"""The subcommands of ``penstock``, by name. Nothing of a subcommand is imported here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: its location as ``module:function``, its summary, the extra that installs its packages, and the
    location of the function that returns its parser, by default ``make_parser`` or ``FUNCTION_parser`` in the same
    module."""

    entry: str
    summary: str
    extra: str = "cpu"
    parser: str = ""

    @property
    def parser_entry(self) -> str:
        """The location of the function that returns the parser. Its module is fast to import."""
        module, _, function = self.entry.partition(":")
        return self.parser or f"{module}:{'make' if function == 'main' else function}_parser"


COMMANDS = {
    "serve": Command(
        "penstock.service.app.command:main",
        "serve a model over gRPC (needs penstock-llm[cpu], [torch] or [cuda])",
        parser="penstock.service.config.command_line:make_parser",
    ),
    "worker": Command(
        "penstock.service.hosts.command:main", "run a part of a model that several hosts share, for penstock serve"
    ),
    "gateway": Command(
        "penstock.clients.gateway.server.command:main",
        "serve OpenAI's HTTP API for a running service",
        "gateway",
        "penstock.clients.gateway.server.flags:make_parser",
    ),
    "status-page": Command(
        "penstock.clients.status_page.command:main",
        "show a running service in a browser, for operators",
        "gateway",
        "penstock.clients.status_page.flags:make_parser",
    ),
    "chat": Command("penstock.clients.cli.chat:main", "chat with a running service in the terminal"),
    "generate": Command("penstock.clients.cli.generate:main", "run a JSONL file of requests; can be resumed"),
    "bench": Command(
        "penstock.clients.bench.main:main",
        "measure the latency and throughput of a service",
        "bench",
        "penstock.clients.bench.flags:make_parser",
    ),
    "simulate": Command(
        "penstock.service.simulate.command:main",
        "predict throughput and latency of a service in virtual time",
        parser="penstock.service.simulate.flags:make_parser",
    ),
    "profile": Command("penstock.service.app.profile:main", "show where the time of a model's steps goes on a CPU"),
    "top": Command("penstock.clients.cli.admin.top:main", "show live statistics of a running service"),
    "explain": Command("penstock.clients.cli.admin.explain:main", "show where a request's time went"),
    "requests": Command("penstock.clients.cli.admin.requests:list_requests", "list the live requests of a service"),
    "cancel": Command("penstock.clients.cli.admin.requests:cancel", "cancel live requests of a service"),
    "drain": Command("penstock.clients.cli.admin.command:drain", "refuse new requests and finish running ones"),
    "flush-cache": Command("penstock.clients.cli.admin.command:flush_cache", "drop the cached prefixes of a service"),
    "adapters": Command("penstock.clients.cli.admin.adapters:main", "list, load and unload LoRA adapters of a service"),
    "settings": Command("penstock.clients.cli.admin.command:settings", "show or change a running service's limits"),
    "models": Command("penstock.service.app.supported_models:main", "list the models that can be served"),
    "doctor": Command("penstock.clients.cli.doctor:main", "show what this machine has and what is missing"),
    "completion": Command("penstock.clients.cli.completion:main", "print a script for completion in a shell"),
}
