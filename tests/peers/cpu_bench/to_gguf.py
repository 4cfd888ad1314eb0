"""Runs llama.cpp's own converter on one of our models: to_gguf.py SOURCES MODEL OUT.

The converter knows pre-tokenizers by a hash of what they do to a text, and ours is not in its list; it is told that
ours is GPT-2's, which it is. Runs in the environment of transformers.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Writes weights in bf16."""
    sources, model, out = sys.argv[1:]
    sys.path[:0] = [str(Path(sources) / "gguf-py"), sources]
    from conversion import base

    for found in vars(base).values():
        if isinstance(found, type) and "get_vocab_base_pre" in vars(found):
            found.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # type: ignore[attr-defined]
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", "bf16"]
    runpy.run_path(str(Path(sources) / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
