"""The demo model as a trainable network: Qwen3's arithmetic with Hugging Face's parameter names.

`Decoder.state_dict()` has the names and tensors of a Qwen3 checkpoint, so the export renames nothing. The logits are
those of transformers' `Qwen3ForCausalLM`. There is no KV cache, and data and optimisers are in other modules.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder. The defaults are the demo model's: 5.8 million parameters, tied embeddings."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 16_384
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-6


class Network(nn.Module):
    """A trainable module with its sizes."""

    shape: DecoderShape


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotary_tables(shape: DecoderShape, length: int) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the rotary embedding, each `(length, head_dim)` in fp32. Both halves of a row
    are equal."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of `x`, which is `(batch, heads, length, head_dim)`."""
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(head_dim)) v, where position i attends to 0..i. All tensors are `(batch, heads,
    length, head_dim)`."""
    if q.is_cuda or q.shape[-2] > 2048:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    # On a CPU in bf16, forward and backward passes of plain matrix products take 0.4 of the fused kernel's time at
    # length 256 and three quarters at 2048.
    length = q.shape[-2]
    mask = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    rows = q.shape[0] * q.shape[1]
    keys = k.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(mask.expand(rows, length, length), q.flatten(0, 1), keys, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(q)


class SelfAttention(nn.Module):
    """Causal grouped-query attention that normalises each head's queries and keys."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rotated queries and keys, and the values, each `(batch, num_heads, length, head_dim)`."""
        heads = (*x.shape[:-1], -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.num_heads // self.shape.num_kv_heads
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = causal_attention(*self.heads(x, cos, sin))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TransformerLayer(nn.Module):
    """Attention, then the MLP. Each reads the normalised residual stream and adds its output to the stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Maps token ids `(batch, length)` to the final, normalised hidden states `(batch, length, hidden_size)`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        device = tokens.device.type
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


def init_weights(network: nn.Module) -> None:
    """Sets matrices to small random values, and those whose output is added to the residual stream to zero."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)


class Decoder(Network):
    """The trunk and the output head, which is the embedding matrix."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        init_weights(self)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns logits `(batch, length, vocab_size)`."""
        return functional.linear(self.model(tokens, cos, sin), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the mean cross entropy in nats of `tokens[:, 1:]`; `tokens` is `(batch, length + 1)`."""
        logits = self(tokens[:, :-1], cos, sin)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
