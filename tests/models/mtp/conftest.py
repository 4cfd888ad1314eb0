"""Models with an MTP head in their checkpoint, and what the head computes in plain torch, by the definition in
https://arxiv.org/abs/2412.19437 section 2.2."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

NUM_LAYERS = 3
PREFIX = f"model.layers.{NUM_LAYERS}."


@dataclass
class MtpModel:
    """A model whose checkpoint has a head, and what the head computes."""

    target: Any
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
        return functional.rms_norm(x, x.shape[-1:], self.tensors[name], self.target.module.config.rms_norm_eps)

    @torch.inference_mode()
    def hidden(self, token_ids, hidden):
        """(T,) and (T, hidden) -> (T, hidden), before the head's last norm."""
        model = self.target.module.model
        embedded = self.norm(model.embed_tokens(torch.tensor(token_ids)), "enorm.weight")
        joined = torch.cat((embedded, self.norm(hidden, "hnorm.weight")), 1)
        x = functional.linear(joined, self.tensors["eh_proj.weight"])[None]
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
            logits = self.target.module.lm_head(self.norm(x, "shared_head.norm.weight"))[0]
            noise = torch.zeros(len(logits))
            if sampling.temperature:
                ids = torch.arange(len(logits))
                noise = keyed_gumbel(torch.tensor(sampling.seed), torch.tensor(position), ids)
            found.append(int((logits / (sampling.temperature or 1) + noise).argmax()))
            tokens, hidden = [*tokens, found[-1]], torch.cat((hidden, x))
        return found


@pytest.fixture(scope="session")
def build_mtp_model(build_model):
    """Makes a GLM-4.5, or a model of another config, with a random head."""

    def build(path, kind=("Glm4MoeConfig", Glm4MoeDecoderLayer), **changes):
        config_class, layer_class = kind
        target = build_model(path, config_class, {"num_hidden_layers": NUM_LAYERS, **changes})
        config = target.module.config
        torch.manual_seed(8)
        layer = layer_class(config, NUM_LAYERS - 1).eval()
        for name, tensor in layer.state_dict().items():
            tensor.copy_(torch.randn(tensor.shape) / 4 if tensor.ndim > 1 else 1 + torch.randn(tensor.shape) / 3)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape) / 8)
        hidden = config.hidden_size
        norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
        tensors = {name: 1 + torch.randn(hidden) / 3 for name in norms}
        tensors["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / 8
        model = MtpModel(target, layer, tensors)
        write_head(path, {**layer.state_dict(), **tensors, **copies(target.module)})
        return model

    return build


def copies(module):
    """What published checkpoints repeat."""
    return {
        "embed_tokens.weight": module.model.embed_tokens.weight.detach(),
        "shared_head.head.weight": module.lm_head.weight.detach(),
    }


def write_head(path, tensors, count=1):
    """Adds a head's tensors to a model's checkpoint."""
    file = path / "model.safetensors"
    head = {PREFIX + name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file({**load_file(file), **head}, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))


@pytest.fixture
def mtp_config(worker_config):
    """The config of a worker on a model with a head."""

    def make(model, backend, num_drafts=3, **config):
        speculation = SpeculationConfig(DraftMethod.MTP, num_drafts)
        return worker_config(model.path, backend=backend, speculation=speculation, **{"max_model_len": 512, **config})

    return make
