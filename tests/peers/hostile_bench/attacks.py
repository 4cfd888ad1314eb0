"""The attackers, one for each class. Each runs in a process of its own:

python -m hostile_bench.attacks NAME '{"grpc": "127.0.0.1:50051", "http": ..., "metrics": ..., "seconds": 10}'
"""

import json
import resource
import sys
from collections.abc import Callable

from hostile_bench import grpc_attacks, http_attacks, raw_attacks
from hostile_bench.attack import Attack

ATTACKS: dict[str, Callable[[Attack], None]] = {
    each.__name__: each
    for each in (
        grpc_attacks.constraint_choice,
        grpc_attacks.constraint_lark,
        http_attacks.gateway_bodies,
        http_attacks.tool_parser,
        grpc_attacks.refused_prompts,
        grpc_attacks.map_collisions,
        raw_attacks.stalled_streams,
        raw_attacks.heads,
        raw_attacks.partial_messages,
        raw_attacks.partial_messages_with_key,
        grpc_attacks.refused_tokenize,
        http_attacks.bodies_that_almost_end,
        raw_attacks.unread_answers,
        http_attacks.unread_http_answers,
        http_attacks.many_keys,
        raw_attacks.idle_connections,
        raw_attacks.idle_http,
        raw_attacks.idle_metrics,
        raw_attacks.bad_bytes,
    )
}


def main() -> None:
    """Prints that it is ready, runs one, and prints what it cost as JSON."""
    name, told = sys.argv[1:]
    print("ready", flush=True)
    attack = Attack(**json.loads(told))
    ATTACKS[name](attack)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {
        "cpu_s": used.ru_utime + used.ru_stime,
        "num_calls": attack.num_calls,
        "num_bytes": attack.num_bytes,
        "answers": dict(attack.answers.most_common()),
    }
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
