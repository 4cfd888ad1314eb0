"""Tokenizers in GGUF files give the ids of the tokenizer.json that they were made from."""

import json
import random

import gguf
import pytest
import tokenizers
import transformers
from model_files.gguf_files import add_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges

from penstock.models.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from penstock.models.checkpoint.gguf.tokenizer import tokenizer_files, write_tokenizer
from penstock.models.checkpoint.tokenizer.parts import bpe
from penstock.models.errors import ModelError
from penstock.service.text.tokenizer import Tokenizer as ServedTokenizer

TEXTS = [
    "Hello, world! It's 12345 o'clock; I'LL say 3.14159 isn't 22/7.",
    "  two  spaces\tand\n\n\nlines \r\n with   trailing   ",
    "Füße, naïve, Ångström, e\u0301cole, \u1e9b\u0323",
    "Здравствуй, мир. 你好，世界！こんにちは 안녕하세요 שלום مرحبا हिन्दी",
    'def f(x: int) -> str:\n    return f"{x!r}"  # ok\n\tpass',
    "🚀🙂👩‍👩‍👧 ½ ² ٣ ९ Ⅻ",
    "CamelCaseWORDS andSnake_case HTTPServer2X don'T we'Ve",
    "<|im_start|>user <s> </s> <0x41> ▁ [PAD]",
    "",
    " ",
    "\u00a0\u2003\u3000x",
]
CORPUS = TEXTS * 3 + ["the quick brown fox jumps over the lazy dog and then it rests in the shade of a tree"] * 5
SPECIAL = ["<|begin|>", "<|end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in the tokenizer.json of Llama 3."""


def random_texts():
    generator = random.Random(5)
    letters = sorted(set("".join(TEXTS)) | set("abcXYZ019 '\n\t.,-_äß漢字🙂\u0301"))
    return ["".join(generator.choices(letters, k=generator.randrange(1, 40))) for _ in range(300)]


def byte_level(kind):
    """Returns a trained tokenizer with the words of a family, as transformers or the model's own files build it."""
    built = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    match kind:
        case "gpt-2":
            built = transformers.GPT2Tokenizer(vocab={}, merges=[]).backend_tokenizer
        case "qwen2":
            built = transformers.Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
        case "command-r":
            built = transformers.CohereTokenizer(vocab={}, merges=[]).backend_tokenizer
        case "llama-bpe":
            built.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case "smollm":
            built.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
    fresh = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    fresh.pre_tokenizer = built.pre_tokenizer
    if built.normalizer is not None:
        fresh.normalizer = built.normalizer
    fresh.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fresh.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    fresh.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fresh.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if kind == "llama-bpe":
        begin = fresh.token_to_id(SPECIAL[0])
        fresh.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A", None, [(SPECIAL[0], begin)])
    return fresh


def rewritten(tmp_path, original, pre=None, scores=None, architecture="llama", change=lambda writer: None, **config):
    """Returns the tokenizer that a GGUF file with an original has."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    add_tokenizer(writer, json.loads(original.to_str()), config, pre, scores)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    write_tokenizer(file, directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json")), directory


def check_same(one, other):
    for text in [*TEXTS, *random_texts(), *(f"a{token} b" for token in (*SPECIAL, "<think>", "<s>"))]:
        for adds in (True, False):
            ids = one.encode(text, add_special_tokens=adds).ids
            assert ids == other.encode(text, add_special_tokens=adds).ids, text
        assert one.decode(ids) == other.decode(ids)


@pytest.mark.parametrize("kind", ["gpt-2", "qwen2", "command-r", "llama-bpe", "smollm"])
def test_byte_level_tokenizers_give_the_same_ids(kind, tmp_path):
    original = byte_level(kind)
    found, _ = rewritten(tmp_path, original, pre=kind, bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    check_same(original, found)


def sentencepiece(has_prefix):
    """Returns a tokenizer of Llama's kind, whose merges transformers finds from scores; and the scores."""
    trained = Tokenizer(models.BPE())
    spaces = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), "isolated")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    words = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    built = Tokenizer(model)
    built.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    built.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return built, scores


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokenizers_give_the_same_ids(has_prefix, tmp_path):
    original, scores = sentencepiece(has_prefix)
    found, _ = rewritten(
        tmp_path, original, scores=scores, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        architecture="llama" if has_prefix else "gemma2",
        change=lambda writer: writer.add_add_space_prefix(True) if has_prefix else None,
    )  # fmt: skip
    check_same(original, found)


def test_gemma_4_stops_for_the_result_of_a_tool(tmp_path):
    """Its files have the token as one that users defined."""
    original, _ = sentencepiece(has_prefix=False)
    original.add_tokens([AddedToken("<|tool_response>", special=False, normalized=False)])
    _, directory = rewritten(
        tmp_path, original, pre="gemma4", bos_token="<s>", eos_token="</s>", unk_token="<unk>", architecture="gemma4"
    )
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [original.token_to_id(token) for token in ("</s>", "<|tool_response>")]


@pytest.mark.parametrize("denies", [False, True])
def test_gemma_4s_tokenizer_has_merges_a_beginning_and_no_prefix(denies, tmp_path):
    """Whatever the file's metadata say."""
    original, _ = sentencepiece(has_prefix=False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def deny(writer):
        if denies:
            writer.add_add_space_prefix(True)
            writer.add_add_bos_token(False)

    found, _ = rewritten(tmp_path, original, pre="gemma4", architecture="gemma4", change=deny, **names)
    check_same(original, found)


@pytest.mark.parametrize(("pre", "tokens"), [("glm4", ["abc"]), ("chatglm-bpe", ["ab", "c"])])
def test_whether_a_word_that_is_a_token_is_merged(pre, tokens, tmp_path):
    vocabulary = {token: token_id for token_id, token in enumerate(["a", "b", "c", "ab", "abc", "bc"])}
    original = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c")]))
    found, _ = rewritten(tmp_path, original, pre=pre)
    assert found.encode("abc").tokens == tokens


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deepseek-v3", "1234 年go (x)\n", ["123", "4", " ", "年", "go", " (", "x", ")\n"]),
        ("hunyuan", "It'S 12!\n", ["It", "'S", " ", "1", "2", "!\n"]),
        ("hunyuan-dense", "12345年 go!\n", ["123", "45", "年", " go", "!\n"]),
        ("lfm2", "It'S 1234!\n", ["It", "'S", " ", "123", "4", "!\n"]),
        ("llama4", "CamelWORDS 1234", ["Camel", "WORDS", " ", "123", "4"]),
        ("minimax-m2", "CamelWORDS 1234", ["Camel", "WORDS", " ", "123", "4"]),
        ("seed-coder", "go 12 !\n", ["go", " ", "1", "2", " !", "\n"]),
    ],
)
def test_words_of_families_without_a_tokenizer_in_transformers(name, text, words):
    described = {"version": "1.0", "pre_tokenizer": PRE_TOKENIZERS[name].part, "model": bpe({}, [])}
    cut = Tokenizer.from_str(json.dumps(described)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == words


def test_the_service_reads_names_templates_and_ends(tmp_path):
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}<|eot_id|>{% endfor %}"
    original = byte_level("llama-bpe")
    original.add_special_tokens([AddedToken("<|eot_id|>", special=True, normalized=False)])
    _, directory = rewritten(
        tmp_path, original, pre="llama-bpe", bos_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=template
    )
    served = ServedTokenizer(directory)
    assert served.has_chat_template
    assert served.eos_token_ids == tuple(sorted(original.token_to_id(token) for token in (SPECIAL[1], "<|eot_id|>")))
    assert served.special_ids == {original.token_to_id(token) for token in (*SPECIAL, "<|eot_id|>")}
    assert served.encode("hello") == original.encode("hello").ids


def test_the_demo_models_tokenizer_survives(tmp_path):
    from penstock.models.checkpoint.checkpoint import DEMO, resolve_model

    original = Tokenizer.from_file(str(resolve_model(DEMO) / "tokenizer.json"))
    found, _ = rewritten(tmp_path, original, pre="deepseek-r1-qwen", eos_token="<|im_end|>")
    check_same(original, found)


BROKEN: dict[str, dict[str, object]] = {
    "model is 'bert', and must be gemma4, gpt2 or llama": {"model": "bert"},
    "pre is 'klingon', and this way to cut texts": {"pre": "klingon"},
    "tokens has a token twice": {"tokens": ["a", "b", "a"]},
    "tokens is missing or not an array": {"tokens": [1, 2, 3]},
    "token_type has 2 items, and there are 3 tokens": {"token_type": [1, 1]},
    "merges has 'abc', which is not two tokens": {"merges": ["abc"]},
    "merges is missing": {"merges": None},
    "merges is missing or": {"merges": 5},
    "eos_token_id is 3, and there are 3 tokens": {"eos_token_id": 3},
    "add_bos_token is 7, and must be bool": {"add_bos_token": 7},
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_metadata_is_refused_by_its_key(message, tmp_path):
    values: dict[str, object] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]
    } | BROKEN[message]  # fmt: skip
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"^{file}: tokenizer\.ggml\.{message}"):
        tokenizer_files(file)


def test_the_library_reads_what_is_written(tmp_path):
    """A file without a beginning of sequence adds nothing around a text."""
    original = byte_level("gpt-2")
    found, directory = rewritten(tmp_path, original, pre="gpt-2", eos_token=SPECIAL[1])
    assert isinstance(found, tokenizers.Tokenizer)
    assert json.loads((directory / "tokenizer.json").read_text())["post_processor"] is None
