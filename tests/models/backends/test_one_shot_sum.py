"""Small sums over GPUs in memory that they share. No GPU is here: what torch would do with them is faked."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from penstock.models.backends import one_shot_sum
from penstock.models.backends.distributed import Distributed
from penstock.models.backends.one_shot_sum import MAX_BYTES, OneShotSum, join_one_shot

DEVICE = torch.device("cuda", 1)
LINKED = [[0, 4], [4, 0]]


class SharedMemory:
    """Stands for torch's symmetric memory, and for the other rank, which has ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.folders: set[str | None] = set()
        self.exchanged: set[int] = set()

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device == DEVICE
        return torch.zeros(size, dtype=dtype)

    def rendezvous(self, tensor: Tensor, group: str) -> None:
        assert group == "ranks"
        self.folders.add(os.environ.get("TMPDIR"))
        self.exchanged.add(tensor.data_ptr())
        self.calls.append("rendezvous")

    def one_shot_all_reduce_out(self, shared: Tensor, operation: str, group: str, out: Tensor) -> None:
        assert (operation, group) == ("sum", "ranks")
        assert shared.data_ptr() in self.exchanged, "the other ranks cannot read it"
        assert shared.shape == out.shape
        self.calls.append("sum")
        out.copy_(shared + 1)


@pytest.fixture
def memory(monkeypatch) -> SharedMemory:
    """GPUs that are linked, and two ranks, of which this is the second."""
    memory = SharedMemory()
    monkeypatch.setattr(one_shot_sum, "_symmetric_memory", lambda: memory)
    monkeypatch.setattr(one_shot_sum, "nvlinks", lambda: LINKED)
    monkeypatch.setattr(torch.ops, "symm_mem", memory)
    monkeypatch.setattr(one_shot_sum, "_group_name", lambda: "ranks")
    return memory


def join(folder: str = "/private", others: tuple[int, ...] = (1, 1)) -> OneShotSum | None:
    answers = iter(others)
    return join_one_shot(DEVICE, 1, 2, folder, lambda own: min(own, next(answers)))


def test_small_sums_use_the_shared_memory_and_others_nccl(memory, monkeypatch):
    by_nccl: list[Any] = []
    monkeypatch.setattr(distributed, "all_reduce", lambda x, *_: by_nccl.append(x))
    rank = Distributed(1, 2, torch.device("cpu"))
    rank.one_shot = join()
    for x in (torch.full((3, 16), 2.0), torch.full((3, 16), 2.0, dtype=torch.bfloat16), torch.zeros(MAX_BYTES // 4)):
        expected = x + 1
        rank.all_reduce(x)
        assert torch.equal(x, expected)
    assert not by_nccl
    others = [torch.zeros(MAX_BYTES // 4 + 4), torch.zeros(64, dtype=torch.float16), torch.zeros(3)]
    for x in others:
        rank.all_reduce(x)
    assert [id(x) for x in by_nccl] == [id(x) for x in others]


def test_memory_is_exchanged_before_any_sum_and_in_a_private_folder(memory, monkeypatch):
    """A graph cannot capture the exchange."""
    monkeypatch.setenv("TMPDIR", "/for/everyone")
    made = join("/private")
    assert made is not None
    assert memory.folders == {"/private"}
    assert os.environ["TMPDIR"] == "/for/everyone"
    before = len(memory.exchanged)
    for _ in range(2):
        made.add_ranks(torch.zeros(4))
    assert memory.calls == ["rendezvous", "rendezvous", "sum", "sum"]
    assert len(memory.exchanged) == before == 2


@pytest.mark.parametrize(
    ("folder", "links", "told"),
    [
        ("", LINKED, "the ranks are on several hosts"),
        ("/private", [[0, 0], [0, 0]], "GPUs 0 and 1 have no NVLink between them"),
        ("/private", [], "GPUs 0 and 1 have no NVLink between them"),
    ],
)
def test_where_memory_cannot_be_shared_nccl_adds(folder, links, told, memory, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(one_shot_sum, "nvlinks", lambda: links)
    assert join(folder) is None
    assert memory.calls == []
    assert f"sums over 2 GPUs: NCCL for all sizes, since {told}" in caplog.text


def test_a_torch_without_symmetric_memory_is_no_obstacle(memory, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace())
    assert join() is None
    assert f"torch {torch.__version__} has no symmetric memory" in caplog.text


@pytest.mark.parametrize("others", [(0, 0), (1, 0)])
def test_all_ranks_choose_the_same(others, memory, caplog):
    """Another rank cannot, or fails."""
    caplog.set_level("INFO")
    assert join(others=others) is None
    assert len(memory.calls) == 2 * others[0]
    assert "another rank cannot share memory" in caplog.text


def test_an_exchange_that_fails_leaves_the_sums_to_nccl(memory, monkeypatch, caplog):
    caplog.set_level("INFO")

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA driver error: invalid device ordinal\nand a stack")

    monkeypatch.setattr(memory, "rendezvous", fail)
    assert join() is None
    assert "since CUDA driver error: invalid device ordinal" in caplog.text
    assert "stack" not in caplog.text


def test_the_stages_of_a_pipeline_have_gpus_of_their_own(memory, monkeypatch):
    links = [[4 * (one // 2 == other // 2) for other in range(4)] for one in range(4)]
    monkeypatch.setattr(one_shot_sum, "nvlinks", lambda: links)
    answers = iter([1, 1])
    monkeypatch.setattr(memory, "empty", lambda size, *, dtype, device: torch.zeros(size, dtype=dtype))
    assert join_one_shot(torch.device("cuda", 3), 1, 2, "/private", lambda own: min(own, next(answers))) is not None


def test_torch_still_has_what_is_used():
    schema = str(torch.ops.symm_mem.one_shot_all_reduce_out.default._schema)
    assert "(Tensor input, str reduce_op, str group_name, Tensor(a!) out)" in schema
    memory = one_shot_sum._symmetric_memory()
    assert callable(memory.empty)
    assert callable(memory.rendezvous)
    assert one_shot_sum.nvlinks() == []
