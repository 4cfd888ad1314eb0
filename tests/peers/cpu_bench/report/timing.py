"""The figures of one run, from when its requests arrived and when their tokens came."""

import itertools
from collections.abc import Iterable, Sequence

from cpu_bench.wire import Ran, Work
from cpu_bench.workloads import OpenLoop

SLO_TTFT_S = 2.0
"""The longest time to the first token with which a request of W5 counts as goodput."""
SLO_GAP_S = 0.1
"""The longest time between two tokens, likewise."""

Events = Sequence[tuple[float, int]]


def timing(work: Work, ran: Ran, warm_up_s: float = 0.0) -> dict[str, float]:
    """Returns the fields of ``Measured`` that follow from what came when. The times are those of requests that arrived
    after the warm-up. Raises ValueError if tokens are missing."""
    for number, ((_, wanted), events) in enumerate(zip(work.requests, ran.events, strict=True)):
        got = sum(tokens for _, tokens in events)
        if got != wanted:
            raise ValueError(f"request {number} gave {got} tokens and not {wanted}")
    wall = max(ran.ended, *(events[-1][0] for events in ran.events)) - ran.began
    counted = _counted(ran, warm_up_s)
    first = [ran.events[number][0][0] - ran.arrival_of(number) for number in counted]
    gaps = [gap for number in counted for gap in _gaps(ran.events[number])]
    return {
        "wall_s": wall,
        "tokens_per_s": sum(num_output for _, num_output in work.requests) / wall,
        "ttft_p50": 1000 * quantile(first, 0.5),
        "ttft_p99": 1000 * quantile(first, 0.99),
        "itl_p50": 1000 * quantile(gaps, 0.5),
        "itl_p99": 1000 * quantile(gaps, 0.99),
    }


def goodput(ran: Ran, open_loop: OpenLoop) -> dict[str, float]:
    """Returns W5's figures: requests per second that arrived after the warm-up and kept both limits. In the stricter
    figure, every time between two tokens must be short enough; in the other one, the request's mean."""
    counted = _counted(ran, open_loop.warm_up_s)
    strict = sum(_is_kept(ran, number, max(_gaps(ran.events[number]), default=0.0)) for number in counted)
    by_mean = sum(_is_kept(ran, number, _mean_gap(ran.events[number])) for number in counted)
    return {
        "arrivals_per_s": open_loop.requests_per_s,
        "goodput_per_s": strict / open_loop.measured_s,
        "goodput_by_mean_per_s": by_mean / open_loop.measured_s,
        "goodput_share": strict / max(1, len(counted)),
    }


def later_turns(work: Work, ran: Ran) -> dict[str, float]:
    """Returns W6's figure: the time to the first token from the second turn on, where there is a history, at p50."""
    numbers = [number for number in range(len(work.requests)) if number % work.turns]
    first = [ran.events[number][0][0] - ran.arrival_of(number) for number in numbers]
    return {"later_ttft_p50": 1000 * quantile(first, 0.5)}


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolates between the two nearest values; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _counted(ran: Ran, warm_up_s: float) -> list[int]:
    return [number for number in range(len(ran.events)) if ran.arrival_of(number) >= ran.began + warm_up_s]


def _gaps(events: Events) -> Iterable[float]:
    return (later - sooner for (sooner, _), (later, _) in itertools.pairwise(events))


def _mean_gap(events: Events) -> float:
    after_first = sum(tokens for _, tokens in events[1:])
    return (events[-1][0] - events[0][0]) / after_first if after_first else 0.0


def _is_kept(ran: Ran, number: int, gap_s: float) -> bool:
    return ran.events[number][0][0] - ran.arrival_of(number) <= SLO_TTFT_S and gap_s <= SLO_GAP_S
