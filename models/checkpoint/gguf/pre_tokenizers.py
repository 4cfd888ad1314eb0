"""How byte-level tokenizers cut a text into words, by the names that GGUF files give it. Words are never merged."""

from dataclasses import dataclass

from penstock.models.checkpoint.tokenizer.parts import BYTE_LEVEL, Part, split_words
from penstock.models.checkpoint.tokenizer.words import GPT_4O, HUNYUAN_DENSE, KIMI_K2, LLAMA3, QWEN2, SEED_CODER, TEKKEN


@dataclass(frozen=True)
class PreTokenizer:
    """The parts of a tokenizer.json that cut a text, and what goes with them."""

    part: Part
    normalizer: Part | None = None
    ignore_merges: bool = False
    """Whether a word that is a token is not built from smaller ones."""
    adds_bos: bool = False
    """Whether texts get a beginning of sequence unless the file has a field that denies it."""


_NFC: Part = {"type": "NFC"}
_GPT2: Part = {**BYTE_LEVEL, "use_regex": True}


def _sequence(*parts: Part) -> Part:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _digits(normalizer: Part | None = None) -> PreTokenizer:
    """GPT-2's words, with digits by themselves."""
    return PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _GPT2), normalizer)


_LLAMA3 = PreTokenizer(split_words(LLAMA3), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(split_words(QWEN2), _NFC)
_PLAIN = PreTokenizer(_GPT2)
_FALCON = _sequence(
    {"type": "Punctuation", "behavior": "Contiguous"},
    _GPT2,
    {"type": "Digits", "individual_digits": False},
    {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
)

PRE_TOKENIZERS = {
    "chatglm-bpe": PreTokenizer(split_words(LLAMA3)),
    "command-r": _digits(_NFC),
    "dbrx": PreTokenizer(split_words(LLAMA3)),
    "deepseek-r1-qwen": PreTokenizer(split_words(QWEN2)),
    "deepseek-v3": PreTokenizer(split_words(*HUNYUAN_DENSE)),
    "exaone": _digits(),
    "exaone4": _PLAIN,
    "falcon": PreTokenizer(_FALCON),
    "falcon3": _LLAMA3,
    "glm4": PreTokenizer(split_words(LLAMA3), ignore_merges=True),
    "gpt-2": _PLAIN,
    "gpt-4o": PreTokenizer(split_words(GPT_4O)),
    "hunyuan": PreTokenizer(split_words(QWEN2)),
    "hunyuan-dense": PreTokenizer(split_words(*HUNYUAN_DENSE)),
    "kimi-k2": PreTokenizer(split_words(KIMI_K2), ignore_merges=True),
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": PreTokenizer(split_words(GPT_4O), adds_bos=True),
    "minimax-m2": PreTokenizer(split_words(GPT_4O)),
    "olmo": PreTokenizer(_GPT2, _NFC),
    "qwen2": _QWEN2,
    "refact": _digits(),
    "smaug-bpe": PreTokenizer(split_words(LLAMA3)),
    "seed-coder": PreTokenizer(split_words(SEED_CODER)),
    "smollm": _digits(),
    "stablelm2": PreTokenizer(split_words(QWEN2), _NFC),
    "starcoder": _digits(),
    "tekken": PreTokenizer(split_words(TEKKEN), ignore_merges=True, adds_bos=True),
}
"""The pre-tokenizer for each value of ``tokenizer.ggml.pre``, as in llama.cpp and the models' own tokenizer.json."""
