"""The classes of attacks: what each is meant to meet, and the victim that it is meant to hurt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostile_bench.live_service import LiveService
from hostile_bench.victim import ByGrpc, ByHttp, Way, by_long_prompts

BEYOND_A_MINUTE_S = 68.0
"""Long enough for a limit that acts after 60 s."""


@dataclass(frozen=True)
class HostileClass:
    """A class of attacks."""

    attack: str
    item: int
    """The bound that it tests, by number. Number 11 has no class: the machine's memory would have to run out."""
    summary: str
    expects: Sequence[str]
    """Beginnings of answers. Without any of them the attack did not do what it is meant to do."""
    way: Callable[[LiveService], Way] = ByGrpc
    attack_s: float = 0.0
    """How long an attack lasts at least. Above 10 s there is only one."""
    flags: Sequence[str] = ()
    max_open_files: int | None = None


_GIVEN_UP = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")

CLASSES = (
    HostileClass(
        "constraint_choice", 1, "64 outputs that must be one text of 60 to 120 KB", ("with output",), attack_s=8.0
    ),
    HostileClass("constraint_lark", 1, "8 outputs of an ambiguous Lark grammar", ("with output",), attack_s=8.0),
    HostileClass("gateway_bodies", 2, "HTTP bodies of 16 MiB with too many values", ("413",), ByHttp),
    HostileClass("tool_parser", 3, "answers that begin tool calls again and again", ("200",), ByHttp, attack_s=8.0),
    HostileClass(
        "refused_prompts",
        4,
        "prompts of 4 MiB with too many tokens, beside long prompts",
        ("INVALID_ARGUMENT CONTEXT_LENGTH",),
        by_long_prompts,
        attack_s=8.0,
    ),
    HostileClass("map_collisions", 5, "map keys that collide", ("INVALID_ARGUMENT TOO_EXPENSIVE",)),
    HostileClass(
        "stalled_streams",
        6,
        "40 long streams that are not read and hold KV",
        ("held", "reset"),
        attack_s=BEYOND_A_MINUTE_S,
        flags=("--kv-cache-memory-bytes=128M",),
    ),
    HostileClass(
        "heads", 7, "heads of 15 MiB, SETTINGS not acknowledged, no key", ("connection closed", "RESOURCE_EXHAUSTED")
    ),
    HostileClass("partial_messages", 8, "200 messages that never end, no key", _GIVEN_UP, attack_s=20.0),
    HostileClass("partial_messages_with_key", 8, "100 messages that never end", _GIVEN_UP, attack_s=20.0),
    HostileClass(
        "refused_tokenize",
        9,
        "texts of 4 MiB whose tokens are refused, and the memory that they leave",
        ("INVALID_ARGUMENT TOO_EXPENSIVE",),
        attack_s=10.0,
    ),
    HostileClass(
        "bodies_that_almost_end",
        10,
        "64 HTTP bodies of 15 MiB without their last byte",
        ("408", "429", "503"),
        ByHttp,
        attack_s=35.0,
    ),
    HostileClass(
        "unread_answers",
        10,
        "60 answers over gRPC that are not read",
        ("CANCELLED", "reset", "connection closed"),
        attack_s=BEYOND_A_MINUTE_S,
    ),
    HostileClass(
        "unread_http_answers",
        10,
        "60 answers over HTTP that are not read",
        ("connection closed", "cut short", "429", "503"),
        ByHttp,
        attack_s=BEYOND_A_MINUTE_S,
    ),
    HostileClass("many_keys", 12, "short HTTP requests with 100 keys of one tenant", ("200",), ByHttp, attack_s=6.0),
    HostileClass(
        "idle_connections", 12, "400 silent gRPC connections, 256 files", ("connection closed",), max_open_files=256
    ),
    HostileClass(
        "idle_http", 12, "400 silent HTTP connections, 256 files", ("connection closed",), ByHttp, max_open_files=256
    ),
    HostileClass("idle_metrics", 12, "64 silent connections to the metrics page", ("connection closed",)),
    HostileClass("bad_bytes", 13, "bytes that are no protocol, and the log about them", ("closed",), ByHttp),
)
