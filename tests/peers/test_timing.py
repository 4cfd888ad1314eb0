"""Times and goodput of a run, from when requests arrived and tokens came."""

import pytest
from cpu_bench.report.timing import goodput, later_turns, quantile, timing
from cpu_bench.wire import Ran, Work
from cpu_bench.workloads import OpenLoop


def test_timing_is_from_when_all_requests_are_there() -> None:
    work = Work([([1, 2], 3), ([3], 1)])
    ran = Ran(100.0, 104.0, [[(101.0, 1), (101.5, 1), (104.0, 1)], [(103.0, 1)]])
    figures = timing(work, ran)
    assert figures["wall_s"] == 4.0
    assert figures["tokens_per_s"] == 1.0
    assert figures["ttft_p50"] == pytest.approx(2000)
    assert figures["itl_p50"] == pytest.approx(1500)
    assert figures["itl_p99"] == pytest.approx(500 + 0.99 * 2000)


def test_a_missing_token_is_no_result() -> None:
    with pytest.raises(ValueError, match="request 1 gave 0 tokens and not 2"):
        timing(Work([([1], 1), ([1], 2)]), Ran(0.0, 1.0, [[(0.5, 1)], []]))


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.99, 3.97)])
def test_quantiles_lie_between_the_nearest(share: float, wanted: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(wanted)
    assert quantile([], share) == 0.0


def test_requests_of_the_warm_up_do_not_count_in_times() -> None:
    work = Work([([1], 1), ([2], 1)], [1.0, 6.0])
    ran = Ran(100.0, 110.0, [[(109.0, 1)], [(106.5, 1)]], arrivals=[101.0, 106.0])
    figures = timing(work, ran, warm_up_s=5.0)
    assert figures["ttft_p99"] == pytest.approx(500)
    assert figures["tokens_per_s"] == pytest.approx(0.2)


def test_goodput_has_the_requests_that_kept_both_limits() -> None:
    def request(first_s: float, *gaps_s: float) -> list[tuple[float, int]]:
        times = [arrived + first_s]
        for gap_s in gaps_s:
            times.append(times[-1] + gap_s)
        return [(at, 1) for at in times]

    arrived = 100.0
    punctual = request(1.9, 0.09, 0.09, 0.09)
    late = request(2.1, 0.01)
    halting = request(0.5, 0.05, 0.3, 0.05, 0.05, 0.0)  # 0.45 s for five tokens: 90 ms on average
    slow = request(0.5, 0.11, 0.11)
    alone = request(1.0)
    ran = Ran(40.0, 300.0, [punctual, late, halting, slow, alone, punctual], arrivals=[arrived] * 5 + [99.0])
    figures = goodput(ran, OpenLoop(0.5, warm_up_s=60.0, measured_s=10.0))
    assert figures["goodput_per_s"] == pytest.approx(2 / 10)
    assert figures["goodput_by_mean_per_s"] == pytest.approx(3 / 10)
    assert figures["goodput_share"] == pytest.approx(2 / 5)
    assert figures["arrivals_per_s"] == 0.5


def test_a_burst_of_tokens_counts_each_token_in_the_mean() -> None:
    ran = Ran(0.0, 9.0, [[(1.0, 1), (1.3, 4)]])
    figures = goodput(ran, OpenLoop(1.0, warm_up_s=0.0, measured_s=1.0))
    assert (figures["goodput_per_s"], figures["goodput_by_mean_per_s"]) == (0.0, 1.0)


def test_first_turns_have_no_history() -> None:
    work = Work([([1], 1)] * 6, turns=3)
    ran = Ran(0.0, 9.0, [[(at, 1)] for at in (5.0, 2.1, 4.3, 5.0, 2.2, 4.4)], arrivals=[0.0, 2.0, 4.0] * 2)
    assert later_turns(work, ran)["later_ttft_p50"] == pytest.approx(250)
