"""What is read of recorded machines, and where threads are placed there."""

import os
from collections import Counter
from pathlib import Path

import pytest

from penstock.clients.host.cpu.thread_placement import CannotPin, place_threads
from penstock.clients.host.cpu.topology import read_topology

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def siblings(pairs: dict[int, str], name: str = "core_cpus_list") -> dict[str, str]:
    return {f"{CPU}/cpu{number}/topology/{name}": f"{text}\n" for number, text in pairs.items()}


def epyc(root: Path) -> None:
    """Two sockets of 32 cores with two hardware threads each, and memory on a card as a node without CPUs."""
    numbers = range(128)
    write(root, siblings({number: f"{number % 64},{number % 64 + 64}" for number in numbers}))
    write(root, {f"{CPU}/cpu{number}/cpufreq/cpuinfo_max_freq": "3700000\n" for number in numbers})
    write(root, {f"{CPU}/online": "0-127\n", f"{NODE}/node0/cpulist": "0-31,64-95\n"})
    write(root, {f"{NODE}/node1/cpulist": "32-63,96-127\n", f"{NODE}/node2/cpulist": "\n", f"{NODE}/online": "0-2\n"})


def hybrid_laptop(root: Path) -> None:
    """Four fast cores with two hardware threads each, two of them a little faster, and eight efficient ones."""
    fast = {number: f"{number // 2 * 2}-{number // 2 * 2 + 1}" for number in range(8)}
    write(root, siblings({**fast, **{number: str(number) for number in range(8, 16)}}, "thread_siblings_list"))
    most = {number: 4_900_000 if number < 4 else 4_700_000 if number < 8 else 3_600_000 for number in range(16)}
    write(root, {f"{CPU}/cpu{number}/cpufreq/cpuinfo_max_freq": f"{value}\n" for number, value in most.items()})
    write(root, {f"{CPU}/online": "0-15\n", f"{NODE}/node0/cpulist": "0-15\n"})


def arm_server(root: Path) -> None:
    """64 cores alike, one hardware thread each."""
    write(root, siblings({number: str(number) for number in range(64)}))
    write(root, {f"{CPU}/cpu{number}/cpu_capacity": "1024\n" for number in range(64)})
    write(root, {f"{CPU}/online": "0-63\n", f"{NODE}/node0/cpulist": "0-63\n"})


def arm_board(root: Path) -> None:
    """Four small cores, then four large ones."""
    write(root, siblings({number: str(number) for number in range(8)}))
    write(root, {f"{CPU}/cpu{number}/cpu_capacity": f"{414 if number < 4 else 1024}\n" for number in range(8)})
    write(root, {f"{CPU}/online": "0-7\n"})


def container(root: Path) -> None:
    """A quota of 3.5 CPUs on the machine with two sockets."""
    epyc(root)
    write(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"})


def old_container(root: Path) -> None:
    """The same with version 1 of control groups."""
    epyc(root)
    group = "sys/fs/cgroup/cpu,cpuacct/pod"
    write(root, {"proc/self/cgroup": "4:cpu,cpuacct:/pod\n", f"{group}/cpu.cfs_quota_us": "350000\n"})
    write(root, {f"{group}/cpu.cfs_period_us": "100000\n"})


@pytest.mark.parametrize(
    ("build", "num_cpus", "cores", "nodes", "efficient", "quota", "threads"),
    [
        (epyc, 128, 64, (0, 1), 0, None, 64),
        (hybrid_laptop, 16, 12, (0,), 8, None, 12),
        (arm_server, 64, 64, (0,), 0, None, 64),
        (arm_board, 8, 8, (0,), 4, None, 8),
        (container, 128, 64, (0, 1), 0, 3.5, 3),
        (old_container, 128, 64, (0, 1), 0, 3.5, 3),
        (lambda root: None, 6, 6, (0,), 0, None, 6),
    ],
    ids=["epyc", "hybrid laptop", "arm server", "arm board", "container", "old container", "without /sys"],
)
def test_a_machine_is_read(tmp_path, build, num_cpus, cores, nodes, efficient, quota, threads):
    build(tmp_path)
    found = read_topology(tmp_path, set(range(num_cpus)))
    assert (len(found.cpus), found.num_cores, found.nodes, found.quota) == (num_cpus, cores, nodes, quota)
    assert sum(cpu.is_efficient for cpu in found.cpus) == efficient
    assert found.num_threads() == threads


@pytest.mark.parametrize(
    "text", ["", "x", "3-1", "0-", "-1", "0,,1", "0-99999999", "1;2", "\0", "٣", "5", f"0-{'9' * 5000}"]
)
def test_files_that_make_no_sense_count_as_absent(tmp_path, text):
    numbers = range(4)
    write(tmp_path, siblings(dict.fromkeys(numbers, text)))
    write(tmp_path, {f"{CPU}/cpu{number}/cpu_capacity": text for number in numbers})
    write(tmp_path, {f"{CPU}/online": text, f"{NODE}/node1/cpulist": text, f"{NODE}/nodex/cpulist": "0-3"})
    write(tmp_path, {"proc/self/cgroup": f"0::/{text!r}\n", "sys/fs/cgroup/cpu.max": text})
    write(tmp_path, {"sys/devices/cpu_atom/cpus": text, "sys/devices/cpu_core/cpus": text})
    found = read_topology(tmp_path, set(numbers))
    assert found.num_cores == found.num_threads() == 4
    assert found.nodes == (0,)
    assert found.quota is None


def test_files_that_cannot_be_read_count_as_absent(tmp_path):
    (tmp_path / f"{CPU}/cpu0/topology/core_cpus_list").mkdir(parents=True)
    (tmp_path / NODE).mkdir(parents=True)
    (tmp_path / f"{NODE}/node0").write_text("")
    assert read_topology(tmp_path, {0}).num_threads() == 1


def test_only_cpus_that_the_process_may_use_count(tmp_path):
    epyc(tmp_path)
    found = read_topology(tmp_path, {32, 33, 96})
    assert [(cpu.number, cpu.core, cpu.node) for cpu in found.cpus] == [(32, 32, 1), (33, 33, 1), (96, 32, 1)]
    assert (found.num_threads(), found.num_online) == (2, 128)
    # The second hardware thread of a core counts as one if the first is not allowed.
    assert read_topology(tmp_path, {70, 71}).num_threads() == 2


def test_efficiency_cores_that_the_driver_lists_are_known(tmp_path):
    write(tmp_path, {"sys/devices/cpu_core/cpus": "0-1\n", "sys/devices/cpu_atom/cpus": "2-3\n"})
    found = read_topology(tmp_path, set(range(4)))
    assert [cpu.number for cpu in found.cpus if cpu.is_efficient] == [2, 3]


def test_this_machine_has_a_core():
    found = read_topology()
    assert {cpu.number for cpu in found.cpus} == os.sched_getaffinity(0)
    assert 1 <= found.num_threads() <= len(found.cpus)


def placed(root, allowed, num_threads, pinning="auto", build=lambda root: None):
    build(root)
    return place_threads(read_topology(root, set(allowed)), num_threads, pinning)


def test_threads_of_several_nodes_are_kept_on_theirs(tmp_path):
    found = placed(tmp_path, range(128), 64, build=epyc)
    assert (found.is_pinned, Counter(found.nodes)) == (False, {0: 32, 1: 32})
    assert list(found.nodes) == sorted(found.nodes)
    assert set(found.cpus[:32]) == {(*range(32), *range(64, 96))}
    assert set(found.cpus[32:]) == {(*range(32, 64), *range(96, 128))}


def test_few_threads_are_divided_among_nodes(tmp_path):
    """So that the memory of both is read, and containers on one machine do not all choose the first."""
    assert Counter(placed(tmp_path, range(128), 3, build=container).nodes) == {0: 2, 1: 1}
    found = placed(tmp_path, range(128), 4, "on")
    assert (found.nodes, found.cpus) == ((0, 0, 1, 1), ((0,), (1,), (32,), (33,)))
    assert placed(tmp_path, range(128), 4, "off").cpus == placed(tmp_path, range(32), 4).cpus == ()


def test_one_thread_a_core_and_fast_cores_first(tmp_path):
    found = placed(tmp_path, range(16), 12, "on", build=hybrid_laptop)
    assert found.nodes == ()
    assert [cpu for (cpu,) in found.cpus] == [0, 2, 4, 6, *range(8, 16)]
    assert [cpu for (cpu,) in placed(tmp_path, range(16), 3, "on").cpus] == [0, 2, 4]
    assert [cpu for (cpu,) in placed(tmp_path, range(16), 14, "on").cpus] == [0, 2, 4, 6, 1, 3, *range(8, 16)]


@pytest.fixture
def of_eight(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return lambda allowed, num_threads, pinning="auto": placed(tmp_path, allowed, num_threads, pinning)


def test_threads_that_fill_cores_of_their_own_stay_there(of_eight):
    assert of_eight({2, 3, 5}, 3).cpus == ((2,), (3,), (5,))
    assert of_eight({2, 3, 5}, 3, "off").cpus == ()


@pytest.mark.parametrize(
    ("allowed", "num_threads"),
    [
        pytest.param(range(8), 8, id="all cores, which another service has as well"),
        pytest.param(range(8), 3, id="some of all cores, which another service would choose as well"),
        pytest.param((2, 3, 5), 2, id="a quota of two, or --threads 2: a second service may have the same mask"),
        pytest.param((2, 3, 5), 4, id="more threads than cores"),
    ],
)
def test_other_threads_are_left_to_the_system(of_eight, allowed, num_threads):
    found = of_eight(allowed, num_threads)
    assert (found.is_pinned, found.cpus, found.nodes) == (False, (), ())


def test_hardware_threads_of_a_core_are_taken_last(tmp_path, of_eight):
    write(tmp_path, siblings({core: f"{core % 4},{core % 4 + 4}" for core in range(8)}, "thread_siblings_list"))
    assert of_eight(range(1, 8), 5, "on").cpus == ((1,), (2,), (3,), (4,), (5,))
    assert of_eight(range(1, 8), 4, "on").cpus == ((1,), (2,), (3,), (4,))
    assert of_eight((0, 1, 4, 5), 2, "on").cpus == ((0,), (1,))
    assert of_eight((0, 1, 4, 5), 2).cpus == ((0,), (1,))  # one on each of its own cores
    assert of_eight((0, 1, 4, 5), 4, "on").cpus == ((0,), (1,), (4,), (5,))


def test_more_threads_than_cores_cannot_be_pinned(of_eight):
    with pytest.raises(CannotPin, match=r"--cpu-pinning on: 3 threads .* the 2 .* give --threads 2 or fewer"):
        of_eight({2, 3}, 3, "on")
    with pytest.raises(CannotPin, match="--cpu-pinning sometimes: must be one of auto, on, off"):
        of_eight({2, 3}, 2, "sometimes")
