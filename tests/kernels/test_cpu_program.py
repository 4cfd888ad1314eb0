"""A step of the CPU library's program, at sizes that fill neither panels nor vectors: against numpy, and to the same
bits however rows are cut, batched, ordered and spread over threads."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import (
    LANES,
    GemmActivation,
    Kernels,
    KvLayout,
    Matrix,
    SampledToken,
    SamplingRow,
    StorageFormat,
)
from penstock.kernels.cpu.program import (
    DecoderLayer,
    DecoderModel,
    ElementType,
    Library,
    Norm,
    PackedLinear,
    PackedMlp,
    Program,
    QkNormKind,
    Rope,
    Step,
)

Array = NDArray[np.float64]

VOCAB, LOGITS, HIDDEN, INNER, EXPERT_INNER = 45, 37, 50, 21, 20
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 6, 2, 18, 12
HEAD_BYTES = 2 * 32 * LANES * 4
WINDOWS = (0, 24, 0)
EXPERTS, PER_TOKEN = 5, 2
EPS, SCALE, CAP, LOGIT_CAP, EMBEDDING_SCALE = 1e-5, 0.3, 3.0, 5.0, 1.5
BLOCK = 32
NUM_BLOCKS = 64
MEMORY = 8 << 20


class Kind(NamedTuple):
    """What the models differ in."""

    experts: bool = False
    split: bool = False
    """Each linear is a matrix of its own, that takes its inputs in an order of its own."""
    windows: Sequence[int] = WINDOWS


KINDS = {"dense": Kind(), "parts": Kind(split=True), "experts": Kind(experts=True)}


class Toy:
    """A random model: its weights, and the program that runs it."""

    def __init__(
        self, kernels: Kernels, library: Path, kind: Kind, num_threads: int, nodes: Sequence[int] = ()
    ) -> None:
        self.rng = np.random.default_rng(3)
        self.kernels, self.kind = kernels, kind
        self.library = Library(num_threads, library, nodes=nodes)
        self.memory, self.used = self.library.memory(MEMORY), 0
        self.kept: list[object] = []
        self.weights: list[dict[str, Array]] = []
        self.frequencies = [np.float32(10) ** -np.linspace(0, 2 + i, ROTARY // 2, dtype=np.float32) for i in range(2)]
        self.table, self.norm = self.draw(VOCAB, HIDDEN), self.draw(HIDDEN)
        layers = (DecoderLayer * len(kind.windows))(*(self.layer(i) for i in range(len(kind.windows))))
        ropes = (Rope * 2)(*(Rope(self.keep(turns), 1.0 + i, ROTARY // 2) for i, turns in enumerate(self.frequencies)))
        page_bytes = len(kind.windows) * KV_HEADS * HEAD_BYTES
        pages = self.library.shared_memory(NUM_BLOCKS * BLOCK // LANES * page_bytes)
        ctypes.memset(pages.address, 0xFF, pages.num_bytes)
        table = self.matrix(self.table)
        model = DecoderModel(
            kernels=ctypes.pointer(kernels), vocab_size=VOCAB, num_logits=LOGITS, hidden_size=HIDDEN,
            intermediate_size=INNER, num_layers=len(kind.windows), num_heads=HEADS, num_ropes=2,
            num_experts=EXPERTS, experts_per_token=PER_TOKEN,
            expert_size=EXPERT_INNER, normalise_experts=0, expert_activation=GemmActivation.SILU,
            expert_scale=1.0, num_groups=1, groups_per_token=1, qk_norm=QkNormKind.HEAD, gated_mlp=1,
            activation=GemmActivation.SILU, block_size=BLOCK, norm_eps=EPS, logit_scale=1.0,
            embedding_scale=EMBEDDING_SCALE, attention_scale=SCALE, attention_soft_cap=CAP, logit_soft_cap=LOGIT_CAP,
            embedding_format=StorageFormat.F32, packed_embedding=table,
            head=PackedLinear(1, (Matrix * 3)(table)), norm=Norm(self.keep(self.norm)),
            layers=ctypes.addressof(layers), ropes=ctypes.addressof(ropes), pages=pages.address,
            page_bytes=page_bytes,
        )  # fmt: skip
        self.kept += [layers, ropes, pages, model]
        self.library.loaded()
        self.program: Program = self.library.program(model)

    def draw(self, *shape: int) -> Array:
        """Weights; norms lie about 1."""
        drawn = self.rng.standard_normal(shape).astype(np.float32).astype(np.float64)
        return drawn / 4 + 1 if len(shape) == 1 else drawn / 3

    def keep(self, values: NDArray[np.generic]) -> int:
        array = np.ascontiguousarray(values, dtype=np.int32 if values.dtype.kind == "i" else np.float32)
        self.kept.append(array)
        return array.ctypes.data

    def matrix(self, weights: Array, ordered: bool = False, rows: Sequence[int] | None = None) -> Matrix:
        """``rows``: which of the weights each row of the matrix is, or -1."""
        columns = weights.shape[1]
        order = self.rng.permutation(columns).astype(np.int32) if ordered else np.arange(columns, dtype=np.int32)
        address = self.keep(weights[:, order])
        rows = range(len(weights)) if rows is None else rows
        panels, panel_bytes = -(-len(rows) // LANES), int(self.kernels.panel_bytes(StorageFormat.F32, columns, 0))
        addresses = np.zeros(panels * LANES, dtype=np.uint64)
        addresses[: len(rows)] = [0 if row < 0 else address + row * columns * 4 for row in rows]
        begin = self.memory.address + self.used
        self.used += -(-panels * panel_bytes // 64) * 64
        assert self.used <= MEMORY
        matrix = Matrix(StorageFormat.F32, len(rows), columns, 0, panel_bytes, begin, None, None)
        self.library.pack(self.kernels, matrix, addresses, ElementType.F32, 4)
        matrix.order = self.keep(order) if ordered else None
        return matrix

    def linear(self, parts: list[Array]) -> PackedLinear:
        if not self.kind.split:
            return PackedLinear(1, (Matrix * 3)(self.matrix(np.concatenate(parts))))
        # The second of several takes its inputs as they come.
        return PackedLinear(len(parts), (Matrix * 3)(*(self.matrix(part, i != 1) for i, part in enumerate(parts))))

    def gated(self, gate: Array, up: Array) -> PackedLinear:
        if self.kind.split:
            return self.linear([gate, up])
        size = len(gate)
        rows = [
            part * size + row if row < size else -1
            for panel in range(-(-size // LANES))
            for part in range(2)
            for row in range(panel * LANES, panel * LANES + LANES)
        ]
        return PackedLinear(1, (Matrix * 3)(self.matrix(np.concatenate([gate, up]), False, rows)))

    def layer(self, index: int) -> DecoderLayer:
        query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = {"q": (query, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, query), "n0": (HIDDEN,),
                  "n2": (HIDDEN,), "n3": (HIDDEN,), "qn": (HEAD_DIM,), "kn": (HEAD_DIM,), "sinks": (HEADS,),
                  "router": (EXPERTS, HIDDEN)}  # fmt: skip
        inner = EXPERT_INNER if self.kind.experts else INNER
        for e in range(EXPERTS if self.kind.experts else 1):
            shapes |= {f"gate{e}": (inner, HIDDEN), f"up{e}": (inner, HIDDEN), f"down{e}": (HIDDEN, inner)}
        w = {name: self.draw(*shape) for name, shape in shapes.items()}
        self.weights.append(w)
        mlps = [
            PackedMlp(self.gated(w[f"gate{e}"], w[f"up{e}"]), self.linear([w[f"down{e}"]]))
            for e in range(EXPERTS if self.kind.experts else 1)
        ]
        layer = DecoderLayer(
            attention_norm=Norm(self.keep(w["n0"])), mlp_norm=Norm(self.keep(w["n2"])),
            mlp_post_norm=Norm(self.keep(w["n3"])),
            query_norm=Norm(self.keep(w["qn"])), key_norm=Norm(self.keep(w["kn"])), sinks=self.keep(w["sinks"]),
            window=self.kind.windows[index], rope=index % 2, qkv=self.linear([w["q"], w["k"], w["v"]]),
            output=self.linear([w["o"]]), has_kv=1, intermediate_size=INNER, scalar=1.0,
            kv=KvLayout(
                StorageFormat.F32, KV_HEADS, HEAD_DIM, HEAD_BYTES, len(self.kind.windows) * KV_HEADS * HEAD_BYTES
            ),
            kv_offset=index * KV_HEADS * HEAD_BYTES,
        )  # fmt: skip
        if self.kind.experts:
            experts = (PackedMlp * EXPERTS)(*mlps)
            self.kept.append(experts)
            layer.router_norm = layer.expert_norm = layer.mlp_norm
            layer.router, layer.experts = self.linear([w["router"]]), ctypes.addressof(experts)
        else:
            layer.mlp = mlps[0]
        return layer

    def logprobs(self, token_ids: Sequence[int]) -> Array:
        """By numpy, (T, LOGITS)."""
        x = self.table[list(token_ids)] * EMBEDDING_SCALE
        for index, w in enumerate(self.weights):
            rope, window = index % 2, self.kind.windows[index]
            x = x + attention(normed(x, w["n0"]), w, self.frequencies[rope], 1.0 + rope, window)
            y = normed(x, w["n2"])
            x = x + normed(experts(y, w) if self.kind.experts else mlp(y, w, 0), w["n3"])
        logits: Array = normed(x, self.norm) @ self.table[:LOGITS].T
        logits = LOGIT_CAP * np.tanh(logits / LOGIT_CAP)
        return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def normed(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight)


def rotated(x: Array, frequencies: NDArray[np.float32], scale: float) -> Array:
    """(T, heads, head_dim)."""
    half = ROTARY // 2
    angles = np.arange(len(x))[:, None, None] * frequencies.astype(np.float64)
    cosines, sines = np.cos(angles) * scale, np.sin(angles) * scale
    a, b = x[..., :half], x[..., half:ROTARY]
    return np.concatenate([a * cosines - b * sines, b * cosines + a * sines, x[..., ROTARY:]], -1)


def attention(x: Array, w: dict[str, Array], frequencies: NDArray[np.float32], scale: float, window: int) -> Array:
    length = len(x)
    query = rotated(normed((x @ w["q"].T).reshape(length, HEADS, HEAD_DIM), w["qn"]), frequencies, scale)
    key = rotated(normed((x @ w["k"].T).reshape(length, KV_HEADS, HEAD_DIM), w["kn"]), frequencies, scale)
    key, value = (
        np.repeat(part, HEADS // KV_HEADS, 1) for part in (key, (x @ w["v"].T).reshape(length, KV_HEADS, HEAD_DIM))
    )
    scores = CAP * np.tanh(np.einsum("qhd,khd->hqk", query, key) * SCALE / CAP)
    behind = np.arange(length)[:, None] - np.arange(length)
    shares = np.where((behind >= 0) & (behind < (window or length)), np.exp(scores), 0.0)
    shares /= shares.sum(-1, keepdims=True) + np.exp(w["sinks"])[:, None, None]
    return np.asarray(np.einsum("hqk,khd->qhd", shares, value).reshape(length, -1) @ w["o"].T)


def mlp(x: Array, w: dict[str, Array], expert: int) -> Array:
    gate = x @ w[f"gate{expert}"].T
    return np.asarray(gate / (1 + np.exp(-gate)) * (x @ w[f"up{expert}"].T) @ w[f"down{expert}"].T)


def experts(x: Array, w: dict[str, Array]) -> Array:
    shares = np.exp(x @ w["router"].T)
    shares /= shares.sum(-1, keepdims=True)
    kept = np.where(shares >= np.sort(shares, -1)[:, -PER_TOKEN, None], shares, 0.0)
    return sum((kept[:, e, None] * mlp(x, w, e) for e in range(EXPERTS)), np.zeros_like(x))


class Row(NamedTuple):
    """Positions [start, end) of a sequence, and which of them are wanted, in which way."""

    token_ids: Sequence[int]
    blocks: Sequence[int]
    start: int
    end: int
    scored: Sequence[int] = ()
    sampled: bool = False


Told = dict[tuple[int, int], NDArray[np.float32]]
"""Log-probabilities of all tokens, in the order of their ids, after a position of a row."""


def run(toy: Toy, rows: Sequence[Row], num_threads: int, backwards: bool = False) -> Told:
    """A step. What is wanted is asked for in the order of the batch, or ``backwards``."""
    lengths = [row.end - row.start for row in rows]
    token_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int64)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    sign = -1 if backwards else 1
    sampled = [(i, row.end - 1) for i, row in enumerate(rows) if row.sampled][::sign]
    scored = [(i, position) for i, row in enumerate(rows) for position in row.scored][::sign]
    arrays = {
        "token_ids": np.concatenate([np.array(row.token_ids[row.start : row.end]) for row in rows]),
        "starts": np.array([row.start for row in rows]),
        "ends": np.array([row.end for row in rows]),
        "token_starts": token_starts,
        "tables": tables,
        "sampled": np.array([token_starts[i] + position - rows[i].start for i, position in sampled], dtype=np.int64),
        "scored": np.array([token_starts[i] + position - rows[i].start for i, position in scored], dtype=np.int64),
        "targets": np.full(len(scored), 1 << 30),  # no token: it must not be an address
        "num_tops": np.full(len(scored), LOGITS),
        "chosen": np.empty(len(scored), dtype=np.float32),
    }
    sampling = (SamplingRow * len(sampled))()
    for line in sampling:
        line.top_p = line.repetition_penalty = 1.0
        line.num_logprobs = LOGITS
    tokens = (SampledToken * len(sampled))()
    wanted = sampled + scored
    ids = np.full((len(wanted), LOGITS), -1, dtype=np.int32)
    tops = np.full((len(wanted), LOGITS), np.nan, dtype=np.float32)
    step = Step(
        num_tokens=int(token_starts[-1]), num_rows=len(rows), num_sampled=len(sampled), num_scored=len(scored),
        table_stride=tables.shape[1], sampling=ctypes.addressof(sampling), tokens=ctypes.addressof(tokens),
        room=LOGITS, top_ids=ids.ctypes.data, tops=tops.ctypes.data, scored_room=LOGITS,
        scored_top_ids=ids[len(sampled) :].ctypes.data, scored_tops=tops[len(sampled) :].ctypes.data,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )  # fmt: skip
    toy.program.run(step, num_threads)
    told = {}
    for key, order, values in zip(wanted, ids, tops, strict=True):
        told[key] = np.empty(LOGITS, dtype=np.float32)
        told[key][order] = values
    for token, order in zip(tokens, ids, strict=False):
        assert token.token_id == order[0]
    return told


@pytest.fixture
def make(table: Kernels, cpu_library: Path) -> Callable[..., Toy]:
    return lambda kind, num_threads=3, nodes=(): Toy(table, cpu_library, kind, num_threads, nodes)


LENGTHS = (290, 1, 40, 17, 530)


def sequences() -> list[Row]:
    """Rows of several lengths, whose blocks lie here and there."""
    rng = np.random.default_rng(9)
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    rows = []
    for length in LENGTHS:
        num_blocks = -(-length // BLOCK)
        rows.append(Row(rng.integers(0, VOCAB, length).tolist(), blocks[:num_blocks], 0, length, sampled=True))
        blocks = blocks[num_blocks:]
    return rows


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_is_what_numpy_makes_of_it(make: Callable[..., Toy], kind: Kind) -> None:
    toy = make(kind)
    rows = [row._replace(scored=range(row.end - 1)) for row in sequences()[:4]]
    told = run(toy, rows, 3)
    assert len(told) == sum(LENGTHS[:4])  # more than the head takes at once
    for i, row in enumerate(rows):
        got = np.array([told[i, position] for position in range(row.end)])
        np.testing.assert_allclose(got, toy.logprobs(row.token_ids), atol=3e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bits_do_not_depend_on_the_step(make: Callable[..., Toy], kind: Kind) -> None:
    """Each row alone and whole on one thread; then cut, together with the others, their results asked for backwards."""
    toy = make(kind)
    rows = sequences()
    alone = {(i, row.end - 1): run(toy, [row], 1)[0, row.end - 1] for i, row in enumerate(rows)}
    for num_threads, chunk in ((3, 1000), (2, 100), (3, 33)):
        rng = np.random.default_rng(chunk)
        left = list(range(len(rows)))
        starts = [0] * len(rows)
        while left:
            step, told_of = [], list(rng.permutation(left))
            for i in told_of:
                end = min(rows[i].end, starts[i] + int(rng.integers(1, chunk + 1)))
                step.append(rows[i]._replace(start=starts[i], end=end, sampled=end == rows[i].end))
                starts[i] = end
            for (row, position), values in run(toy, step, num_threads, backwards=True).items():
                np.testing.assert_array_equal(values, alone[told_of[row], position])
            left = [i for i in left if starts[i] < rows[i].end]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("num_threads", "num_nodes"), [(16, 1), (64, 3)])
def test_bits_do_not_depend_on_many_threads(
    make: Callable[..., Toy], kind: Kind, num_threads: int, num_nodes: int
) -> None:
    """Threads in several groups, with weights divided among nodes, which this machine need not have."""
    rows = sequences()
    nodes = [thread * num_nodes // num_threads for thread in range(num_threads)] if num_nodes > 1 else ()
    many, one = make(kind, num_threads, nodes), make(kind, 1)
    expected = run(one, rows, 1)
    for used in (num_threads, num_threads - 5):
        told = run(many, rows, used)
        assert told.keys() == expected.keys()
        for key, values in told.items():
            np.testing.assert_array_equal(values, expected[key])


def test_one_wanted_position_of_many_is_the_same(make: Callable[..., Toy]) -> None:
    """Whether logits are wanted of all positions or of one, sampled or scored, in any order."""
    toy = make(KINDS["dense"])
    row = sequences()[0]
    every = run(toy, [row._replace(scored=range(row.end - 1))], 3)
    for position in (0, 63, 64, 200):
        [values] = run(toy, [row._replace(scored=[position], sampled=False)], 2).values()
        np.testing.assert_array_equal(values, every[0, position])
    backwards = run(toy, [row._replace(scored=range(row.end - 1))], 3, backwards=True)
    for key, values in every.items():
        np.testing.assert_array_equal(backwards[key], values)


def test_all_layers_of_experts_work_in_the_same_memory(cpu_library: Path, table: Kernels) -> None:
    toy = Toy(table, cpu_library, Kind(experts=True, windows=(16,) * 48), 1)
    row = sequences()[4]
    run(toy, [row._replace(end=1)], 1)
    before = psutil.Process().memory_info().vms
    run(toy, [row], 1)
    # Four times what all of it needs in one layer, of which 48 would need 30 MiB.
    assert psutil.Process().memory_info().vms - before < 16 << 20
