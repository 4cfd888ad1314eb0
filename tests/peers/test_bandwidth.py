"""The patterns that memory is read by: all of them run, and the best one counts."""

import shutil

import pytest
from cpu_bench.bandwidth import measure


def test_patterns_reach_all_threads() -> None:
    found = measure.patterns(6, is_huge=True)
    assert {pattern.threads for pattern in found} == {1, 2, 4, 6}
    assert len(set(found)) == 4 * len(measure.STREAMS) * len(measure.AHEAD_BYTES)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LOOK_S", 0.0)
    monkeypatch.setattr(measure, "LONGER_S", 0.0)
    found = measure.best_reading(8 << 20, 2)
    assert found is not None
    rate, pattern = found
    assert rate > 0
    assert pattern in measure.patterns(2, is_huge=pattern.is_huge)
    assert "threads" in str(pattern)


def test_without_a_compiler_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert measure.best_reading(1 << 20, 1) is None
