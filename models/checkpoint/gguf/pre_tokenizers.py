"""How byte-level tokenizers cut a text into words, by the names that GGUF files give it. Words are never merged."""

from dataclasses import dataclass

from penstock.models.checkpoint.tokenizer.parts import BYTE_LEVEL, Part, split_words

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"\p{N}" + _REST
SEED_CODER = _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
HUNYUAN_DENSE = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str) -> str:
    """Words that begin with capital letters, and a new word at each capital letter after a small one."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    return f"{begin}{_UPPER}*{_LOWER}+{ending}|{begin}{_UPPER}+{_LOWER}*{ending}"


TEKKEN = _cased("") + r"|\p{N}" + _CASED_REST
GPT_4O = _cased(_CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_REST


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
