"""Makes the models that engines are compared on: real shapes, random weights in bf16, nothing downloaded.

    M0   a tiny Llama: 4 layers of 256, where only overhead counts
    M1   the shape of Qwen3-0.6B
    M2   the shape of Llama-3.2-1B

The same bits every time: weights from a seed, and a tokenizer whose tokens are counted up and not trained.
"""

import argparse
import itertools
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cpu_bench.floors import SHAPES

# Models take seconds to import, and a tokenizer alone has no use for them.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEED = 0

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def main() -> None:
    """Makes the models that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    arguments = parser.parse_args()
    for name in arguments.names:
        if not (arguments.folder / name / "model.safetensors").exists():
            print(f"{name}: {make_model(name, arguments.folder / name) / 1e6:,.1f} M parameters", flush=True)


def make_model(name: str, folder: Path) -> int:
    """Writes a model in Hugging Face's layout, the weights last; returns how many parameters it has."""
    from transformers import AutoModelForCausalLM

    config = _config(name)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    # Of the whole vocabulary: an engine that leaves out ids without a token would do less than the others.
    make_tokenizer(config.vocab_size).save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="20GB")
    return sum(parameter.numel() for parameter in model.parameters())


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: the special tokens, the bytes, then pairs, triples and so on of letters, up to ``size``."""
    letters = string.ascii_lowercase + string.ascii_uppercase
    tokens = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    longest = list(letters)
    while len(merges) < size - len(tokens):
        room = size - len(tokens) - len(merges)
        merges += itertools.islice(itertools.product(longest, letters), room)
        longest = [first + second for first, second in itertools.product(longest, letters)]
    tokens += [first + second for first, second in merges]
    bpe = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=_SPECIALS[0], pad_token=_SPECIALS[0], eos_token=_SPECIALS[2],
        chat_template=_CHAT_TEMPLATE, model_max_length=32_768,
    )  # fmt: skip


def _config(name: str) -> "PreTrainedConfig":
    from transformers import LlamaConfig, Qwen3Config

    shape = SHAPES[name]
    common: dict[str, Any] = {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if name == "M0":
        return LlamaConfig(tie_word_embeddings=False, **common)
    make, theta = (Qwen3Config, 1e6) if name == "M1" else (LlamaConfig, 5e5)
    return make(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": theta}, **common)


if __name__ == "__main__":
    main()
