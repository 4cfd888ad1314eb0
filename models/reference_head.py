"""A head that drafts, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.wide import widened
from penstock.models.attention_groups import attention_groups
from penstock.models.backend import Backend
from penstock.models.draft_head import Floats, HeadResult, HeadStep
from penstock.models.eagle_checkpoint import FC, HIDDEN_NORM, HeadCheckpoint
from penstock.models.kv_pages import KVPages
from penstock.models.loader import FileSource, load_weights
from penstock.models.memory import check_weights_fit
from penstock.models.reference_backend import DTYPES, ReferenceBackend, attend
from penstock.models.rotations import rotations
from penstock.models.torch_device import allocated
from penstock.models.weights import DenseLinear, RmsNorm, Weights
from penstock.scheduler.plan import WorkerConfig


class ReferenceHead:
    """A ``DraftHead`` over torch operations on gathered pages."""

    def __init__(
        self,
        head: HeadCheckpoint,
        weights: Weights,
        fc: DenseLinear,
        hidden_norm: RmsNorm,
        pages: KVPages,
        max_positions: int,
    ) -> None:
        self._spec = head.spec
        self._weights = weights
        self._fc = fc
        self._hidden_norm = hidden_norm
        self._pages = pages
        self._target_ids = torch.from_numpy(head.target_ids).to(pages.device)
        self._rotations = rotations(head.spec.ropes[0], head.spec.rotary_dim, max_positions, pages.device)

    def renew(self, block_ids: Sequence[int]) -> None:
        """The blocks have a new owner, who will write them."""
        self._pages.renew(list(block_ids))

    @torch.inference_mode()
    def run(self, step: HeadStep) -> HeadResult:
        """Computes a step, writing the KV of every token."""
        spec, weights, pages = self._spec, self._weights, self._pages
        [layer], device = weights.layers, pages.device
        positions = torch.from_numpy(step.positions).to(device)
        cos, sin = self._rotations
        groups = attention_groups(step, None, pages.num_blocks, pages.block_size, device)
        x = self._given(step)
        # Ids were checked at admission; an id out of range must still never be an address.
        token_ids = torch.from_numpy(step.token_ids).to(device).clamp(0, spec.vocab_size - 1)
        embeddings = functional.embedding(token_ids, weights.embedding)
        before = torch.cat((layer.before_attention(embeddings), self._hidden_norm(x)), dim=1)
        slots = torch.from_numpy(step.slots).to(device)
        x = x + attend(spec, pages, 0, layer, before, (cos[positions], sin[positions]), slots, groups)
        x = x[step.sampled.tolist()]
        x = x + layer.mlp(layer.before_mlp(x))
        probabilities, best = widened(weights.head(weights.norm(x))).softmax(1).max(1)
        return HeadResult(self._target_ids[best].tolist(), probabilities.tolist(), x.float().cpu().numpy())

    def _given(self, step: HeadStep) -> Tensor:
        """(T, hidden): what the layer goes on from."""
        if step.features is not None:
            return self._fc(self._tensor(step.features))
        assert step.hidden is not None, "one of them is given"
        return self._tensor(step.hidden)

    def _tensor(self, array: Floats) -> Tensor:
        return torch.from_numpy(array).to(self._pages.device, self._weights.embedding.dtype)


def load_head(config: WorkerConfig, head: HeadCheckpoint, backend: Backend) -> ReferenceHead:
    """The head for a model that was loaded on the backend in plain torch. Raises ModelError."""
    assert isinstance(backend, ReferenceBackend), "a head runs where its model does"
    spec, facts, embedding = head.spec, backend.facts, backend.embedding
    dtype, device = DTYPES[facts.dtype], embedding.device
    check_weights_fit(config, "the EAGLE-3 head", spec.num_parameters * dtype.itemsize, facts.dtype)
    shared = None if spec.has_embedding else embedding
    weights = load_weights(head.info, dtype, device, "auto", spec.head_rows, embedding=shared)
    source = FileSource(head.info)
    fc = torch.empty(spec.hidden_size, spec.fc_columns, dtype=dtype, device=device)
    source.fill(f"{FC}.weight", fc)
    norm = torch.empty_like(weights.norm.weight)
    source.fill(HIDDEN_NORM, norm)
    with allocated(facts.num_blocks, device):
        pages = KVPages(spec, facts.num_blocks, facts.block_size, dtype, device)
    hidden_norm = RmsNorm(norm, spec.norm_eps)
    return ReferenceHead(head, weights, DenseLinear(fc), hidden_norm, pages, facts.max_model_len)
