"""A draft head in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.backends.base import Backend
from penstock.models.backends.memory import allocated
from penstock.models.backends.reference.attention_groups import attention_groups
from penstock.models.backends.reference.backend import ReferenceBackend, attend
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.backends.torch_common.rope_tables import cos_sin_tables
from penstock.models.checkpoint.draft_head import HeadCheckpoint
from penstock.models.speculative.heads.head import Floats, HeadDraft, HeadResult, HeadStep, ids_on_host, joined
from penstock.models.speculative.heads.torch_common import HeadWeights, draw_drafts, draw_tensors, load_head_weights
from penstock.scheduler.worker_config import WorkerConfig


class ReferenceHead:
    """A ``DraftHead`` of torch operations on gathered pages."""

    def __init__(self, head: HeadCheckpoint, weights: HeadWeights, pages: KVPages, max_positions: int) -> None:
        self._spec = head.spec
        self._weights = weights
        self._pages = pages
        self._cos_sin_tables = cos_sin_tables(head.spec.ropes[0], head.spec.rotary_dim, max_positions, pages.device)

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        self._pages.reset_blocks(list(block_ids))

    @torch.inference_mode()
    def run(self, step: HeadStep) -> HeadResult:
        spec, weights, pages = self._spec, self._weights.common, self._pages
        [layer], device = weights.layers, pages.device
        positions = torch.from_numpy(step.positions).to(device)
        cos, sin = self._cos_sin_tables
        groups = attention_groups(step, None, pages.num_blocks, pages.block_size, device)
        # Ids were checked at admission; an id out of range must still never become an address.
        token_ids = torch.from_numpy(ids_on_host(step.token_ids)).to(device).clamp(0, spec.vocab_size - 1)
        embeddings = functional.embedding(token_ids, weights.embedding)
        x, before = self._before_layer(step, embeddings)
        slots = torch.from_numpy(step.slots).to(device)
        mixed = attend(spec, pages, 0, layer, before, (cos[positions], sin[positions]), slots, groups)
        x = (x + layer.after_attention(mixed))[step.sampled.tolist()]
        x = x + layer.after_mlp(layer.mlp(layer.before_mlp(x)))
        normed = weights.norm(x)
        drawn = draw_drafts(weights.head(normed), self._weights.target_ids, *draw_tensors(step.draws, device))
        drafts = [HeadDraft(*draft) for draft in zip(*(part.tolist() for part in drawn), strict=True)]
        hidden = normed if spec.continues_after_norm else x
        return HeadResult(lambda: drafts, drawn.token_ids.cpu().numpy(), hidden.float().cpu().numpy())

    def _before_layer(self, step: HeadStep, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the layer continues from, (T, hidden), and the input of its queries, keys and values."""
        weights, [layer] = self._weights, self._weights.common.layers
        if weights.embedding_norm is not None:
            pair = weights.embedding_norm(embeddings), weights.hidden_norm(self._given(step))
            x = weights.fc(torch.cat(pair, dim=1))
            return x, layer.before_attention(x)
        x = self._given(step)
        x = x if step.features is None else weights.fc(x)
        return x, torch.cat((layer.before_attention(embeddings), weights.hidden_norm(x)), dim=1)

    def _given(self, step: HeadStep) -> Tensor:
        """Returns the features or hidden states of all tokens."""
        if step.features is not None:
            return self._tensor(joined(step.features))
        assert step.hidden is not None, "a step has features or hidden states"
        return self._tensor(joined([step.hidden]))

    def _tensor(self, array: Floats) -> Tensor:
        return torch.from_numpy(array).to(self._pages.device, self._weights.common.embedding.dtype)


def load_head(config: WorkerConfig, head: HeadCheckpoint, backend: Backend) -> ReferenceHead:
    """Loads the head for a model on the reference backend. Raises ModelError."""
    assert isinstance(backend, ReferenceBackend), "a head runs on its model's backend"
    facts, embedding = backend.facts, backend.embedding
    weights = load_head_weights(config, head, facts.dtype, embedding, backend.head, backend.num_logits)
    with allocated(facts.num_blocks, embedding.device):
        pages = KVPages(head.spec, facts.num_blocks, facts.block_size, embedding.dtype, embedding.device)
    return ReferenceHead(head, weights, pages, facts.max_model_len)
