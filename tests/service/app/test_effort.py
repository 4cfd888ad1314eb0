"""Whether a process gets the time that it wants."""

import os
import subprocess
import sys

import pytest

from penstock.service.app import effort
from penstock.service.app.effort import Effort


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """Writes what the system says of process 7."""
    directory = tmp_path / "7"
    directory.mkdir()
    monkeypatch.setattr(effort, "Path", lambda _: tmp_path)

    def write(state, user_s, system_s):
        ticks = [int(seconds * os.sysconf("SC_CLK_TCK")) for seconds in (user_s, system_s)]
        (directory / "stat").write_text(f"7 (py) thon) {state} {' '.join('0' * 10)} {ticks[0]} {ticks[1]} 0")

    return write


@pytest.mark.parametrize(
    ("state", "user_s", "system_s", "is_starved"),
    [
        ("R", 1.1, 1.0, True),  # it runs, and got a tenth of a core
        ("R", 1.4, 1.4, False),  # it runs all the time: a loop without end
        ("S", 1.0, 1.0, False),  # it waits for something
        ("T", 1.0, 1.0, False),  # it was stopped
    ],
)
def test_who_wants_to_run_and_cannot_is_starved(stat, state, user_s, system_s, is_starved):
    stat("R", 1.0, 1.0)
    looks = Effort(7)
    stat(state, user_s, system_s)
    assert looks.is_starved(1.0) is is_starved


def test_one_that_is_gone_wants_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        looks = Effort(process.pid)
    assert not looks.is_starved(1.0)
