"""Attention over our KV pages for the modules of transformers, which call it by the name of an implementation."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.models.backends.reference.attention_groups import AttentionGroup, attention_groups, grouped_attention
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.batch.batch import Batch
from penstock.models.errors import ModelError

_NUMBERS = itertools.count(1)

KNOWN = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache"}
"""Arguments that are used, or that have no effect here."""


class ModuleAttention:
    """The attention of all layers of one module. Its ``name`` is that of its implementation in transformers."""

    def __init__(self, pages: KVPages, kv_sources: Sequence[int]) -> None:
        """``kv_sources`` has the layer whose pages each layer attends to."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        self.name = f"penstock_{next(_NUMBERS)}"
        self.layers: set[int] = set()
        """The layers that have called it since this was cleared."""
        self._pages = pages
        self._kv_sources = kv_sources
        self._slots = torch.empty(0, dtype=torch.int64)
        self._groups: Callable[[int | None], list[AttentionGroup]] = lambda window: []
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, lambda *_, **__: None)

    def begin(self, batch: Batch, slots: Tensor) -> None:
        """Prepares for a step. ``slots`` (T,) are those of its tokens."""
        by_window: dict[int | None, list[AttentionGroup]] = {}
        pages = self._pages

        def groups(window: int | None) -> list[AttentionGroup]:
            if window not in by_window:
                by_window[window] = attention_groups(batch, window, pages.num_blocks, pages.block_size, pages.device)
            return by_window[window]

        self._slots, self._groups = slots, groups
        self.layers.clear()

    def probe(self) -> None:
        """Prepares for a token that no row has, at a slot of the page that pads tables."""
        self._slots = torch.tensor([self._pages.num_blocks * self._pages.block_size], device=self._pages.device)
        self._groups = lambda window: []
        self.layers.clear()

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Implements transformers' interface: ``query`` is (1, H, T, D), ``key`` and ``value`` (1, K, T, D); returns
        (1, T, H, D). Raises ModelError for what would change the result and is not known here."""
        unknown = sorted(name for name, value in options.items() if value is not None and name not in KNOWN)
        if unknown or attention_mask is not None or value.shape != key.shape:
            what = f"the options {', '.join(unknown)}" if unknown else "a mask of its own"
            if value.shape != key.shape:
                what = f"keys of {key.shape[-1]} dimensions and values of {value.shape[-1]}"
            raise ModelError(f"{type(module).__name__}: its attention has {what}, which is not supported")
        layer, pages = module.layer_idx, self._pages
        source = self._kv_sources[layer]
        num_heads, _, _, head_dim = pages.keys[source].shape
        if (key.shape[1], key.shape[3]) != (num_heads, head_dim):
            raise ModelError(
                f"{type(module).__name__}: has {key.shape[1]} key heads of {key.shape[3]} dimensions, and config.json "
                f"describes {num_heads} of {head_dim}: such a model is not supported"
            )
        self.layers.add(layer)
        queries = query[0].transpose(0, 1)
        if source == layer:
            pages.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        mixed = grouped_attention(
            pages,
            source,
            queries,
            self._groups(options.get("sliding_window")),
            scale=options.get("scaling"),
            cap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        return mixed.unsqueeze(0), None
