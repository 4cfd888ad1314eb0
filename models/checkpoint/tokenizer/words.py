"""The regular expressions by which byte-level tokenizers cut a text into words, by the models that had them first."""

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
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, but: str = "") -> str:
    """Words that begin with capital letters, and a new word at each capital letter after a small one.
    ``but`` excludes characters from them."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{begin}{upper}*{lower}+{ending}|{begin}{upper}+{lower}*{ending}"


TEKKEN = _cased("") + r"|\p{N}" + _CASED_REST
GPT_4O = _cased(_CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_REST
KIMI_K2 = r"\p{Han}+|" + _cased(_CONTRACTIONS + "?", but=r"&&[^\p{Han}]") + r"|\p{N}{1,3}" + _REST
