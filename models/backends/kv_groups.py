"""Divides the layers of a model into groups whose KV is in blocks of their own, so that layers with a window keep only
what they read. See docs/architecture.md. Imports no tensor library."""

from dataclasses import dataclass

from penstock.kv.block_groups import BlockGroups
from penstock.models.architecture.spec import ModelSpec
from penstock.scheduler.worker_config import MAX_BATCHED_TOKENS, WorkerConfig

MOST_EMPTY = 0.1
"""The maximum share of places in blocks that stay empty because layers cannot be divided evenly."""
MOST_MOVED = 0.25
"""The maximum number of windowed layers in group 0, as a share of the others there."""


@dataclass(frozen=True)
class KvGroups:
    """The groups of a model's layers. Group 0 keeps the KV of all tokens; those after it have windows."""

    of_layers: tuple[int, ...]
    """The group of each layer. One without keys and values of its own is in the group of those that it reads."""
    places: tuple[int, ...]
    """The place of each layer's keys and values, or of those that it reads, in a block of its group."""
    window: int = 1
    """The largest window of the windowed groups."""

    @property
    def num_windowed(self) -> int:
        return max(self.of_layers)

    @property
    def num_places(self) -> int:
        """The number of layers whose KV a block has room for."""
        return 1 + max(self.places)

    def bytes_per_token(self, spec: ModelSpec, element_bytes: int, part: range | None = None) -> int:
        """Returns the bytes of a token in a block, with the layers that the block has, or with these of them."""
        if not self.num_windowed:
            return spec.kv_bytes_per_token(element_bytes, part)
        num_layers = sum(map(spec.has_kv, range(spec.num_layers)))
        return spec.kv_bytes_per_token(element_bytes) // num_layers * self.num_places

    def in_blocks(self, config: WorkerConfig) -> BlockGroups:
        """Returns what sequences need of the groups."""
        # A step has fewer tokens if its backend chooses that.
        num_tokens = config.max_num_batched_tokens or MAX_BATCHED_TOKENS
        return BlockGroups(self.num_windowed, self.window, config.block_size, num_tokens)

    @property
    def facts(self) -> dict[str, int]:
        """The fields of ``WorkerFacts``."""
        return {"num_window_groups": self.num_windowed, "window": self.window}


def one_group(spec: ModelSpec) -> KvGroups:
    """Returns all layers as one group."""
    place_of: dict[int, int] = {}
    for layer in filter(spec.has_kv, range(spec.num_layers)):
        place_of[layer] = len(place_of)
    places = tuple(place_of.get(spec.kv_sources[layer], 0) for layer in range(spec.num_layers))
    return KvGroups((0,) * spec.num_layers, places)


def divide_layers(config: WorkerConfig, spec: ModelSpec) -> KvGroups:
    """Returns the groups of a model's layers: one, if the plans name no others, or if others would save nothing."""
    layers = [layer for layer in range(spec.num_layers) if spec.has_kv(layer)]
    whole = [layer for layer in layers if spec.windows[layer] is None]
    windowed = [layer for layer in layers if spec.windows[layer] is not None]
    can_be_divided = whole and windowed and len(spec.layers_by_kv_sizes()) == 1
    # A draft model or head has KV for each block, whatever the block is for.
    if not config.frees_windows or not can_be_divided or config.block_bytes_beside:
        return one_group(spec)
    if config.pipeline_parallel_size > 1:
        return one_group(spec)
    divisions = [_Division(len(whole) + moved, len(windowed) - moved) for moved in range(len(windowed))]
    allowed = [each for each in divisions if each.in_group_0 <= (1 + MOST_MOVED) * len(whole)]
    best = min(allowed, key=lambda each: (each.num_places, each.in_group_0))
    in_group_0 = {*whole, *windowed[len(windowed) - (best.in_group_0 - len(whole)) :]}
    group_of: dict[int, int] = {}
    place_of: dict[int, int] = {}
    num_in = [0] * (1 + best.num_windowed)
    for layer in layers:
        # Neighbours are in different groups, so each group has about as many of any part of the layers.
        group = 0 if layer in in_group_0 else 1 + sum(num_in[1:]) % best.num_windowed
        group_of[layer], place_of[layer] = group, num_in[group]
        num_in[group] += 1
    sources = spec.kv_sources
    groups = KvGroups(
        tuple(group_of.get(sources[layer], 0) for layer in range(spec.num_layers)),
        tuple(place_of.get(sources[layer], 0) for layer in range(spec.num_layers)),
        max(spec.windows[layer] or 1 for layer in windowed),
    )
    # A worker that replaces another has as many blocks as that one, for the same groups.
    is_settled = config.num_blocks is not None
    return groups if is_settled or _pays(groups, config, spec, len(layers)) else one_group(spec)


@dataclass(frozen=True)
class _Division:
    """A number of layers in group 0, and a number of layers to divide."""

    in_group_0: int
    in_windows: int

    @property
    def num_windowed(self) -> int:
        """The number of windowed groups, each with no more layers than group 0."""
        return -(-self.in_windows // self.in_group_0)

    @property
    def num_places(self) -> int:
        """The number of places of layers in a block of each group together."""
        return (1 + self.num_windowed) * self.in_group_0


def _pays(groups: KvGroups, config: WorkerConfig, spec: ModelSpec, num_layers: int) -> bool:
    """Returns whether short sequences take hardly more memory, and the longest one less."""
    num_tokens = config.max_model_len or spec.max_positions
    empty = (1 + groups.num_windowed) * groups.num_places - num_layers
    num_blocks = -(-num_tokens // config.block_size)
    needed = groups.in_blocks(config).num_blocks_for(num_tokens) * groups.num_places
    return empty <= MOST_EMPTY * num_layers and needed < num_blocks * num_layers
