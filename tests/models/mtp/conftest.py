"""Models with an MTP head in their checkpoint, and what the head computes in plain torch, by the definition in
https://arxiv.org/abs/2412.19437 section 2.2."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

NUM_LAYERS = 3
PREFIX = f"model.layers.{NUM_LAYERS}."


class Kind(NamedTuple):
    """A family's heads."""

    config_class: str
    layer_class: Any
    prefix: str = PREFIX
    layer: str = ""
    embedding_norm: str = "enorm.weight"
    hidden_norm: str = "hnorm.weight"
    fc: str = "eh_proj.weight"
    norm: str = "shared_head.norm.weight"
    norm_offset: float = 0.0
    continues_after_norm: bool = False
    """Whether the next draft continues from the hidden states after the last norm."""
    has_copies: bool = True
    """Whether the checkpoint repeats the embedding and the output head, and its config has the number of heads."""
    sizes: Mapping[str, int] = MappingProxyType({})
    """The sizes of the config's experts, which are large by default."""


SMALL_EXPERTS = MappingProxyType({"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
GLM = Kind("Glm4MoeConfig", Glm4MoeDecoderLayer, sizes=SMALL_EXPERTS)
QWEN = Kind(
    "Qwen3NextConfig", Qwen3NextDecoderLayer, "mtp.", "layers.0.", "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight", 1.0, continues_after_norm=True,
    has_copies=False,
)  # fmt: skip


@dataclass
class MtpModel:
    """A model whose checkpoint has a head, and what the head computes."""

    target: Any
    kind: Kind
    layer: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    """The head's own tensors beside its layer."""

    @property
    def path(self):
        return self.target.path

    def features_of(self, token_ids):
        """(T, hidden): after the model's last norm."""
        with torch.inference_mode():
            return self.target.module.model(torch.tensor([token_ids])).last_hidden_state[0]

    def norm(self, x, name):
        weight = self.tensors[name] + self.kind.norm_offset
        return functional.rms_norm(x, x.shape[-1:], weight, self.target.module.config.rms_norm_eps)

    @torch.inference_mode()
    def hidden(self, token_ids, hidden):
        """(T,) and (T, hidden) -> (T, hidden), before the head's last norm."""
        model = self.target.module.model
        embedded = self.norm(model.embed_tokens(torch.tensor(token_ids)), self.kind.embedding_norm)
        joined = torch.cat((embedded, self.norm(hidden, self.kind.hidden_norm)), 1)
        x = functional.linear(joined, self.tensors[self.kind.fc])[None]
        positions = torch.arange(len(token_ids))[None]
        mask = torch.full((len(token_ids), len(token_ids)), -torch.inf).triu(1)[None, None]
        turned = self.layer(x, attention_mask=mask, position_embeddings=model.rotary_emb(x, positions))
        return (turned if isinstance(turned, torch.Tensor) else turned[0])[0]

    @torch.inference_mode()
    def drafts(self, history, count, sampling):
        """Returns what the head drafts after a history."""
        tokens, hidden = list(history[1:]), self.features_of(history)[:-1]
        found = []
        for position in range(len(history), len(history) + count):
            x = self.hidden(tokens, hidden)[-1:]
            normed = self.norm(x, self.kind.norm)
            logits = self.target.module.lm_head(normed)[0]
            noise = torch.zeros(len(logits))
            if sampling.temperature:
                ids = torch.arange(len(logits))
                noise = keyed_gumbel(torch.tensor(sampling.seed), torch.tensor(position), ids)
            found.append(int((logits / (sampling.temperature or 1) + noise).argmax()))
            next_hidden = normed if self.kind.continues_after_norm else x
            tokens, hidden = [*tokens, found[-1]], torch.cat((hidden, next_hidden))
        return found


@pytest.fixture(scope="session")
def mtp_kinds():
    """GLM-4.5's heads and Qwen3-Next's."""
    return GLM, QWEN


@pytest.fixture(scope="session")
def build_mtp_model(build_model):
    """Makes a GLM-4.5, or a model of another config, with a random head."""

    def build(path, kind=GLM, **changes):
        target = build_model(path, kind.config_class, {"num_hidden_layers": NUM_LAYERS, **kind.sizes, **changes})
        config = target.module.config
        torch.manual_seed(8)
        types = getattr(config, "layer_types", None) or ["full_attention"] * NUM_LAYERS
        layer = kind.layer_class(config, max(n for n, kind in enumerate(types) if kind == "full_attention")).eval()
        for name, tensor in layer.state_dict().items():
            tensor.copy_(torch.randn(tensor.shape) / 4 if tensor.ndim > 1 else 1 + torch.randn(tensor.shape) / 3)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape) / 8)
        hidden = config.hidden_size
        norms = (kind.embedding_norm, kind.hidden_norm, kind.norm)
        tensors = {name: 1 + torch.randn(hidden) / 3 for name in norms}
        tensors[kind.fc] = torch.randn(hidden, 2 * hidden) / 8
        of_layer = {kind.layer + name: tensor for name, tensor in separate_experts(layer.state_dict()).items()}
        copied = copies(target.module) if kind.has_copies else {}
        count = {"num_nextn_predict_layers": 1} if kind.has_copies else {}
        write_head(path, kind.prefix, {**of_layer, **tensors, **copied}, **count)
        return MtpModel(target, kind, layer, tensors)

    return build


def copies(module):
    """What published checkpoints repeat."""
    return {
        "embed_tokens.weight": module.model.embed_tokens.weight.detach(),
        "shared_head.head.weight": module.lm_head.weight.detach(),
    }


def separate_experts(tensors):
    """The tensors of a layer as they are published, with matrices of their own for each expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == "mlp.experts.gate_up_proj":
            for expert, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                found |= {f"mlp.experts.{expert}.gate_proj.weight": gate, f"mlp.experts.{expert}.up_proj.weight": up}
        elif name == "mlp.experts.down_proj":
            found |= {f"mlp.experts.{expert}.down_proj.weight": rows for expert, rows in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def write_head(path, prefix, tensors, **config):
    """Adds a head's tensors to a model's checkpoint, and fields to its config."""
    file = path / "model.safetensors"
    head = {prefix + name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file({**load_file(file), **head}, file, {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, **config}))


@pytest.fixture
def mtp_config(worker_config):
    """The config of a worker on a model with a head."""

    def make(model, backend, num_drafts=3, **config):
        speculation = SpeculationConfig(DraftMethod.MTP, num_drafts)
        return worker_config(model.path, backend=backend, speculation=speculation, **{"max_model_len": 512, **config})

    return make
