"""What is told of a worker from outside is true, also when we ourselves were not there to see it."""

import signal
import subprocess
import sys
import time

import pytest

from penstock.models.executor.liveness import Heartbeat, MemoryKills, _cgroup_files, is_stopped


def test_silence_is_counted_from_the_last_sound():
    heartbeat = Heartbeat(0.25, now=100.0)
    for tick in range(1, 9):
        assert heartbeat.length(100.0 + tick / 4) == tick / 4
    heartbeat.received(102.0)
    assert heartbeat.length(102.25) == 0.25


def test_time_in_which_we_could_not_listen_is_no_silence():
    heartbeat = Heartbeat(0.25, now=100.0)
    assert heartbeat.length(100.25) == 0.25
    assert heartbeat.length(160.0) == pytest.approx(0.5)  # we were stopped for a minute
    assert heartbeat.length(160.25) == pytest.approx(0.75)
    heartbeat.received(160.3)
    assert heartbeat.length(200.0) == pytest.approx(0.25, abs=0.06)
    heartbeat.received(230.0)
    assert heartbeat.length(230.1) == 0.0


def test_being_a_little_late_is_no_excuse():
    heartbeat = Heartbeat(0.25, now=0.0)
    lengths = [heartbeat.length(tick * 0.45) for tick in range(1, 21)]
    assert lengths[-1] == pytest.approx(9.0)


def test_a_stopped_process_is_distinguished_from_running_and_dead_ones():
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.001)
        process.send_signal(signal.SIGCONT)
        while is_stopped(process.pid):
            time.sleep(0.001)
        process.kill()
    assert not is_stopped(process.pid)


def test_kills_for_memory_are_those_since_it_was_made(tmp_path):
    events, vmstat = tmp_path / "memory.events", tmp_path / "vmstat"
    events.write_text("low 0\noom 7\noom_kill 3\noom_group_kill 9\n")
    kills = MemoryKills([events, vmstat, tmp_path / "nowhere"])
    assert not kills.have_grown()
    events.write_text("low 0\noom 9\noom_kill 3\noom_group_kill 10\n")
    vmstat.write_text("nr_free_pages 5\noom_kill 8\n")
    assert not kills.have_grown()  # what could not be read at first says nothing
    events.write_text("low 0\noom 9\noom_kill 4\noom_group_kill 10\n")
    assert kills.have_grown()


def test_the_count_of_the_own_cgroup_is_found(tmp_path):
    nested = tmp_path / "pod/main/memory.events"
    nested.parent.mkdir(parents=True)
    nested.touch()
    assert _cgroup_files("0::/pod/main\n", tmp_path) == [nested]
    (tmp_path / "memory.events").touch()
    assert _cgroup_files("0::/not/seen/here\n", tmp_path) == [tmp_path / "memory.events"]
    old = tmp_path / "memory/a:b/memory.oom_control"
    old.parent.mkdir(parents=True)
    old.touch()
    assert _cgroup_files("5:cpu,cpuacct:/a\n4:hugetlb,memory:/a:b\n1:name=systemd:/\n", tmp_path) == [old]
    assert _cgroup_files("", tmp_path) == []


def test_memory_kills_can_be_read_on_this_machine():
    assert not MemoryKills.here().have_grown()
