"""The least time of each stage of a step: by the bytes of weights and KV that it reads at the memory's bandwidth, or by
its operations at the arithmetic's peak, whichever takes longer."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.kernels.cpu.bindings import LANES, Matrix, StorageFormat
from penstock.kernels.cpu.program import DecoderLayer, DecoderModel, Latent, PackedLinear, PackedMlp

FLOATS = {StorageFormat.F32: "float32", StorageFormat.BF16: "bfloat16"}


def arithmetic(format: StorageFormat) -> str:
    """Returns the type in which a format is multiplied: that of floats, and int8 for all others."""
    return FLOATS.get(format, "int8")


class ComputedSpan(NamedTuple):
    """The positions [start, end) of a row that a step computes."""

    start: int
    end: int


@dataclass(frozen=True)
class MachineLimits:
    """What a machine does at best, with the threads that compute."""

    bytes_per_s: float
    operations_per_s: dict[str, float]
    """Multiplications and additions by type, as in ``arithmetic``."""


class StageLimit(NamedTuple):
    """The seconds that a stage must take for its bytes and for its operations."""

    memory: float
    arithmetic: float


class StageLimits:
    """The limits of a model's steps on a machine. The weights that steps read are counted as they are packed. Which
    experts tokens choose is not known, so they count as if each choice were as likely."""

    def __init__(self, model: DecoderModel, machine: MachineLimits) -> None:
        self._model = model
        self._machine = machine
        self._layers = list((DecoderLayer * model.num_layers).from_address(model.layers))

    def of_step(self, spans: Sequence[ComputedSpan], num_sampled: int) -> dict[str, StageLimit]:
        """Returns the limits of a step of these rows, ``num_sampled`` of which get a token."""
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        tokens = sum(span.end - span.start for span in spans)
        for layer in self._layers:
            last = layer is self._layers[-1]
            for stage, num_bytes, operations, kind in self._layer(layer, tokens, num_sampled if last else tokens):
                self._add(totals[stage], num_bytes, operations, kind)
            self._add(totals["attention"], *self._attention(layer, spans), "bfloat16")
        for part in _parts(self._model.head):
            operations = 2.0 * self._model.num_logits * part.columns * num_sampled
            self._add(totals["head"], _num_bytes(part) if num_sampled else 0, operations, _kind(part))
        return {stage: StageLimit(*total) for stage, total in totals.items()}

    def _add(self, total: list[float], num_bytes: float, operations: float, kind: str) -> None:
        rates = self._machine.operations_per_s
        total[0] += num_bytes / self._machine.bytes_per_s
        total[1] += operations / rates.get(kind, max(rates.values()))

    def _layer(self, layer: DecoderLayer, tokens: int, kept: int) -> Iterator[tuple[str, float, float, str]]:
        """Yields the stage, bytes, operations and type of each product. ``kept`` tokens go on after attention."""
        for linear in (layer.qkv, layer.recurrent.input):
            yield from _products("qkv", linear, tokens)
        for linear in (layer.output, layer.recurrent.output):
            yield from _products("output", linear, kept)
        yield from self._latent(layer.latent, tokens, kept)
        if not layer.router.num_parts:
            yield from _mlp("down", layer.mlp, kept)
        else:
            yield from self._experts(layer, kept)
        yield from _products("down", layer.input_gate, kept)
        yield from _products("down", layer.input_projection, kept)

    def _latent(self, latent: Latent, tokens: int, kept: int) -> Iterator[tuple[str, float, float, str]]:
        if not latent.rank:
            return
        yield from _products("qkv", latent.query, tokens)
        for stage, address, count in (("qkv", latent.absorb, tokens), ("output", latent.expand, kept)):
            matrix, heads = Matrix.from_address(address), self._model.num_heads
            num_bytes = heads * _num_bytes(matrix) if count else 0
            yield stage, num_bytes, 2.0 * heads * matrix.rows * matrix.columns * count, _kind(matrix)

    def _experts(self, layer: DecoderLayer, kept: int) -> Iterator[tuple[str, float, float, str]]:
        model = self._model
        yield from _products("experts", layer.router, kept)
        expert = PackedMlp.from_address(layer.experts)
        chosen, pairs = model.experts_per_token / model.num_experts, kept * model.experts_per_token
        distinct = model.num_experts * (1 - (1 - chosen) ** kept)
        for linear in (expert.gate_up, expert.down):
            for _, num_bytes, operations, kind in _products("experts", linear, 1):
                yield "experts", num_bytes * distinct, operations * pairs, kind
        for mlp in (layer.mlp, layer.shared):
            yield from _mlp("experts", mlp, kept)
        yield from _products("experts", layer.shared_gate, kept)

    def _attention(self, layer: DecoderLayer, spans: Iterable[ComputedSpan]) -> tuple[float, float]:
        """Returns the bytes of keys and values that are read, and the operations: for each pair of a query and a key, a
        product and a sum for the score, and the same for the value."""
        pairs = read = 0
        for span in spans:
            positions = range(span.start, span.end)
            pairs += sum(position + 1 - self._first_seen(layer.window, position) for position in positions)
            read += span.end - self._first_seen(layer.window, span.start)
        heads = 1 if layer.kv.is_latent else layer.kv.kv_heads
        num_bytes = read * heads * layer.kv.head_bytes / LANES
        return num_bytes, 4.0 * pairs * self._model.num_heads * layer.kv.head_dim

    def _first_seen(self, window: int, position: int) -> int:
        """Mirrors ``first_seen`` of ``csrc/core/kernel_table.h``."""
        if window == 0:
            return 0
        return position // window * window if self._model.chunked_windows else max(0, position + 1 - window)


def _products(stage: str, linear: PackedLinear, tokens: int) -> Iterator[tuple[str, float, float, str]]:
    for part in _parts(linear):
        yield stage, _num_bytes(part) if tokens else 0, 2.0 * part.rows * part.columns * tokens, _kind(part)


def _mlp(down: str, mlp: PackedMlp, tokens: int) -> Iterator[tuple[str, float, float, str]]:
    """Yields an MLP's products. The library counts the second one to the stage that comes after it."""
    yield from _products("gate and up", mlp.gate_up, tokens)
    yield from _products(down, mlp.down, tokens)


def _parts(linear: PackedLinear) -> list[Matrix]:
    return list(linear.parts)[: linear.num_parts]


def _num_bytes(matrix: Matrix) -> int:
    return int(-(-matrix.rows // LANES) * matrix.panel_bytes)


def _kind(matrix: Matrix) -> str:
    return arithmetic(StorageFormat(matrix.format))
