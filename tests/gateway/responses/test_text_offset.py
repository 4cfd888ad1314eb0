"""``text_offset`` of completions: where each token begins in the text that the same answer has."""

import json
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from penstock.service.text.tokenizer import Tokenizer

PATH = "/v1/completions"
WORDS = ["▁The", "▁kernel", "▁is"]
SAID = ["▁is", "▁kernel", "<0xE6>", "<0x97>", "<0xA5>", ".", "<0x80>", "<0x5C>", "▁The", "s", "</s>"]
"""What the model says: a character of three bytes, then bytes that are none, one of them an ordinary backslash."""


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """As Llama 2's: a space before a text, which decoding strips, bytes for what it has no piece for, and <s>."""
    beginnings = [word[:length] for word in WORDS for length in range(2, len(word) + 1)]
    letters = sorted({*"".join(WORDS), "."})
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: at for at, piece in enumerate(["<unk>", "<s>", "</s>", *letters, *beginnings, *bytes_])}
    merges = [(begun[:-1], begun[-1]) for begun in beginnings]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    directory = tmp_path_factory.mktemp("sentencepiece")
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer(directory)


@pytest.fixture
async def gateway_of(start_gateway, sentencepiece):
    """A gateway whose model says SAID after a prompt of so many tokens, and what it says."""

    async def start(num_prompt_tokens):
        ids = [sentencepiece._library.token_to_id(piece) for piece in SAID]
        return await start_gateway(
            tokenizer=sentencepiece,
            next_token=lambda history, sampling: ids[min(len(history) - num_prompt_tokens, len(ids) - 1)],
        )

    return start


async def ask(gateway, **body):
    """The choices, whole and put together from a stream, which are the same."""
    body = {"max_tokens": 20, "logprobs": 1, "return_token_ids": True} | body
    whole = (await gateway.post(PATH, **body)).json()
    choices = [
        {"text": choice["text"], "token_ids": choice["token_ids"], **choice["logprobs"]} for choice in whole["choices"]
    ]
    streamed: dict[int, dict[str, Any]] = {}
    for chunk in await gateway.chunks(PATH, **body):
        for part in chunk["choices"]:
            choice = streamed.setdefault(part["index"], {"text": "", "token_ids": []})
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids") or []
            for name, values in (part["logprobs"] or {}).items():
                choice.setdefault(name, []).extend(values)
    assert [streamed[index] for index in sorted(streamed)] == choices
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    return choices


def shown(choice):
    """What begins in each token of the text, with its name."""
    offsets = [*choice["text_offset"], len(choice["text"])]
    places = [choice["text"][begin:end] for begin, end in pairwise(offsets)]
    return list(zip(choice["tokens"], places, strict=True))


OUTPUT = [
    (" is", "is"), (" kernel", " kernel"), ("bytes:\\xe6", "日"), ("bytes:\\x97", ""), ("bytes:\\xa5", ""), (".", "."),
    ("bytes:\\x80", "\ufffd"), ("bytes:\\x5c", "\ufffd"), (" The", " The"), ("s", "s"), ("</s>", ""),
]  # fmt: skip


async def test_of_the_output(gateway_of):
    gateway = await gateway_of(3)
    for choice in await ask(gateway, prompt="The kernel", n=3):
        assert choice["text"] == "is kernel日.\ufffd\ufffd Thes"
        assert shown(choice) == OUTPUT


@pytest.mark.parametrize("shows_special_tokens", [False, True])
async def test_of_a_text_that_is_echoed(gateway_of, shows_special_tokens):
    """The text is the caller's: it has no special tokens, whether they are shown or not."""
    gateway = await gateway_of(3)
    [choice] = await ask(gateway, prompt="The kernel", echo=True, skip_special_tokens=not shows_special_tokens)
    assert choice["text"].startswith("The kernel")
    assert shown(choice)[:3] == [("<s>", ""), (" The", "The"), (" kernel", " kernel")]
    assert shown(choice)[3:] == OUTPUT


@pytest.mark.parametrize(
    ("shows_special_tokens", "begin"),
    [(False, [("<s>", ""), (" The", "The")]), (True, [("<s>", "<s>"), (" The", " The")])],
)
async def test_of_ids_that_are_echoed(gateway_of, sentencepiece, shows_special_tokens, begin):
    gateway = await gateway_of(4)
    ids = [*sentencepiece.encode("The"), *(sentencepiece._library.token_to_id(f"<0x{byte}>") for byte in ("E6", "97"))]
    [choice] = await ask(gateway, prompt=ids, echo=True, skip_special_tokens=not shows_special_tokens)
    broken = [("bytes:\\xe6", "\ufffd"), ("bytes:\\x97", "\ufffd")]
    assert shown(choice) == [*begin, *broken, *OUTPUT]


@pytest.mark.parametrize(
    ("stop", "last"),
    [
        ("nel", [(" is", "is"), (" kernel", " ker")]),
        ("日.", [*OUTPUT[:2], ("bytes:\\xe6", ""), ("bytes:\\x97", ""), ("bytes:\\xa5", ""), (".", "")]),
    ],
)
async def test_tokens_of_a_stop_string_stand_at_the_end_of_the_text(gateway_of, stop, last):
    gateway = await gateway_of(3)
    [choice] = await ask(gateway, prompt="The kernel", stop=stop)
    assert shown(choice) == last


async def test_a_stop_string_that_is_kept_has_its_tokens(gateway_of):
    gateway = await gateway_of(3)
    [choice] = await ask(gateway, prompt="The kernel", stop="日.", include_stop_str_in_output=True)
    assert choice["text"] == "is kernel日."
    assert shown(choice) == OUTPUT[:6]


async def test_of_several_prompts_each_has_its_own(gateway_of):
    gateway = await gateway_of(3)
    first, second = await ask(gateway, prompt=["The kernel", "The is"], echo=True)
    assert shown(first)[:3] == [("<s>", ""), (" The", "The"), (" kernel", " kernel")]
    assert shown(second)[:3] == [("<s>", ""), (" The", "The"), (" is", " is")]
    assert shown(first)[3:] == shown(second)[3:] == OUTPUT


async def test_of_a_prompt_that_is_cut(gateway_of):
    gateway = await gateway_of(3)
    [choice] = await ask(gateway, prompt="The kernel is", echo=True, truncate_prompt_tokens=3)
    assert shown(choice)[:3] == [("<s>", ""), (" kernel", "kernel"), (" is", " is")]
    assert choice["text"].startswith("kernel is")
