"""Trains the demo model's tokenizer, writes its files, and encodes the corpus with it.

The tokenizer is a byte-level BPE with 4,096 ids: it encodes any text, and decoding returns the same bytes. It is
trained only if --out has none yet (or with --retrain), because the tokenizer of trained weights must not change. The
corpus is written to train.bin: token ids in uint16, documents in a shuffled order, each followed by <|endoftext|>.

Examples:
    python tokenize_corpus.py
    python tokenize_corpus.py --work /data/demo-train --out /data/demo --retrain
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from tqdm import tqdm

from penstock.models.train_demo.prepare import DEFAULT_WORK

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
VOCAB_SIZE = 4096
REPEATS = {"chat: help": 3, "chat: small talk": 4}  # copies of a domain's documents in train.bin; 1 for others
# Qwen's pattern: words with the blank before them, single digits, runs of punctuation, runs of white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    # Tools are in the system message; calls and their results use the Hermes format. Without tools it is plain ChatML.
    "{%- set turns = messages %}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set turns = messages[1:] %}{{- messages[0]['content'] + '\\n\\n' }}"
    "{%- endif %}"
    "{{- 'You can call these functions:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\nA call is a JSON object:\\n<tool_call>\\n' }}"
    '{{- \'{"name": <name>, "arguments": <object>}\\n</tool_call>\' }}'
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in turns %}"
    "{%- set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{%- set content = message['content'] or '' %}"
    "{%- if message['role'] == 'tool' %}"
    "{%- set content = '<tool_response>\\n' + content + '\\n</tool_response>' %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + role + '\\n' + content }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{%- set function = call['function'] %}"
    "{%- set arguments = function['arguments'] %}"
    "{{- '\\n' if content or not loop.first else '' }}"
    "{{- '<tool_call>\\n{\"name\": ' + function['name'] | tojson + ', \"arguments\": ' }}"
    "{{- arguments if arguments is string else arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a special token, which the tokenizer must have."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def read_texts(path: Path, keep_every: int = 1, repeats: Mapping[str, int] = MappingProxyType({})) -> Iterator[str]:
    """Yields the text of every `keep_every`th document of a .jsonl file. `repeats` has the copies by domain."""
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number % keep_every == 0:
                document = json.loads(line)
                yield from [str(document["text"])] * repeats.get(document["domain"], 1)


def train_tokenizer(corpus: Path) -> Tokenizer:
    """Trains a tokenizer with `VOCAB_SIZE` ids on a third of the corpus. Special tokens have the highest ids."""
    tokenizer = Tokenizer(BPE())
    split = Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        max_token_length=24,
    )

    def plain() -> Iterator[str]:
        for text in read_texts(corpus, keep_every=3):
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "\n")
            yield text

    tokenizer.train_from_iterator(plain(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Writes tokenizer.json, and tokenizer_config.json with the chat template."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16_384,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_corpus(tokenizer: Tokenizer, corpus: Path, out: Path) -> int:
    """Writes the documents' token ids to `out`, documents in a shuffled order. Returns the number of tokens."""
    texts = list(read_texts(corpus, repeats=REPEATS))
    random.Random(2).shuffle(texts)
    end = special_id(tokenizer, END_OF_TEXT)
    total = 0
    new = out.with_suffix(".new")  # a training run may have the old file mapped
    with new.open("wb") as stream, tqdm(total=len(texts), unit="document", desc="encoding") as bar:
        for start in range(0, len(texts), 1024):
            batch = texts[start : start + 1024]
            ids = np.concatenate([[*e.ids, end] for e in tokenizer.encode_batch_fast(batch, add_special_tokens=False)])
            stream.write(ids.astype(np.uint16).tobytes())
            total += len(ids)
            bar.update(len(batch))
    new.replace(out)
    return total


def main() -> None:
    """Trains or reads the tokenizer, and encodes the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of the corpus (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder of the model (default: models/demo)")
    parser.add_argument("--retrain", action="store_true", help="train the tokenizer even if --out has one")
    args = parser.parse_args()
    if args.retrain or not (args.out / "tokenizer.json").exists():
        write_tokenizer(train_tokenizer(args.work / "train.jsonl"), args.out)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    total = encode_corpus(tokenizer, args.work / "train.jsonl", args.work / "train.bin")
    size = sum(len(text.encode()) for text in read_texts(args.work / "train.jsonl", repeats=REPEATS))
    print(f"{total:,} tokens, {size / total:.3f} bytes each")


if __name__ == "__main__":
    main()
