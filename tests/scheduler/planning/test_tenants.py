"""What one tenant computed, no other can find: neither as saved work nor as a number in an answer."""

import random

from penstock.scheduler.config import SchedulerConfig


def run(world, request):
    received = world.add(request)
    while received.finished is None:
        world.schedule()
        world.answer()
    return received


def test_reliability_figure_5_no_cached_token_across_tenants_in_1000_probes(world_type, new_request):
    world = world_type(60, SchedulerConfig())
    rng = random.Random(5)
    for number in range(1000):
        prompt = [rng.randrange(7) for _ in range(rng.randint(8, 40))]
        owner, stranger = rng.sample(("a", "b", "c", "default", ""), 2)
        # Every prompt is new to everybody, whatever was probed before: its first block names the probe.
        prompt[:4] = [number // 7**digit % 7 for digit in range(4)]
        first = run(world, new_request(f"{number} first", prompt, tenant=owner, max_tokens=1))
        probe = run(world, new_request(f"{number} probe", prompt, tenant=stranger, max_tokens=1))
        again = run(world, new_request(f"{number} again", prompt, tenant=owner, max_tokens=1))
        for received in (first, probe):
            assert received.accepted.cached_tokens == received.finished.usage.cached_tokens == 0
        # The positive control: the owner does find all that can be found.
        expected = (len(prompt) - 1) // 4 * 4
        assert again.accepted.cached_tokens == again.finished.usage.cached_tokens == expected > 0
