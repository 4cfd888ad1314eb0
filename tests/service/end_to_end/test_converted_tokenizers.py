"""A model whose directory has only a tokenizer.model or a tekken.json is served with that tokenizer."""

import json
import re
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from serve_process import PENSTOCK

from penstock.clients import Client, RequestFailed
from penstock.clients.chat_messages import ChatMessage
from penstock.service.app.embedded import local_service
from penstock.service.app.prepare import prepare
from penstock.service.config.command_line import parse_config

PROMPT = "the quick [INST] fox ééé 漢 </s>"
FLAGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": "4M", "backend": "reference"}
NUM_SPECIAL = 20


def write_model(directory: Path, vocab_size: int) -> Any:
    """Writes a tiny random Llama without a tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return model


def write_tokenizer_model(directory: Path) -> sentencepiece.SentencePieceProcessor:
    texts = ["the quick brown fox jumps over the lazy dog", "12 345 6789 00 ééé naïve [x] {y}"] * 4
    with open(directory / "tokenizer.model", "wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=stream, model_type="bpe", vocab_size=400, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
            control_symbols=["[INST]", "[/INST]"],
        )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def write_tekken(directory: Path) -> Tekkenizer:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" q", b"ui", b" qui", "é".encode()]
    vocab = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None} for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "num_vocab_tokens": len(vocab), "version": "v3",
        "default_vocab_size": NUM_SPECIAL + len(vocab), "default_num_special_tokens": NUM_SPECIAL,
    }  # fmt: skip
    (directory / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    return Tekkenizer.from_file(directory / "tekken.json")


@pytest.mark.parametrize("kind", ["tokenizer.model", "tekken.json"])
def test_a_model_is_served_with_its_own_tokenizer(kind: str, tmp_path: Path) -> None:
    if kind == "tokenizer.model":
        model_file = write_tokenizer_model(tmp_path)
        prompt, size = [model_file.bos_id(), *model_file.encode(PROMPT)], model_file.get_piece_size()
    else:
        tekken = write_tekken(tmp_path)
        prompt, size = tekken.encode(PROMPT, bos=True, eos=False), tekken.n_words
    model = write_model(tmp_path, size)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    ended = [token_id for token_id in expected if token_id != 2]
    with local_service(str(tmp_path), **FLAGS) as target, Client(target) as client:
        assert client.tokenize(PROMPT) == prompt
        assert client.detokenize(prompt) == PROMPT
        done = client.complete(PROMPT, max_tokens=16, temperature=0.0)
        assert done.token_ids[: len(ended)] == ended
        assert done.text == client.detokenize(ended)
        number = client.complete(PROMPT, max_tokens=8, temperature=0.0, constraint={"regex": "[0-9]{3}"}).text
        assert re.fullmatch("[0-9]{3}", number)
        assert client.model().vocab_size == size
        assert not client.model().has_chat_template
        with pytest.raises(RequestFailed, match=r"no chat template.* --chat-template"):
            client.complete([ChatMessage(role="user", content="hello")], max_tokens=1)


def test_the_log_names_the_flag_for_a_template_and_nothing_stays_on_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, write_tekken(tmp_path).n_words)
    with caplog.at_level("INFO"):
        prepared = prepare(parse_config([f"--model={tmp_path}", "--port=0", "--backend=reference"]))
        with prepared.resources:
            assert prepared.load_tokenizer().encode("the")[0] == 1
            converted = Path(str(prepared.worker.tokenizer))
            assert [each.name for each in converted.iterdir()] == ["tokenizer.json"]
    assert not converted.exists()
    message = f"{tmp_path}: has no chat template, so chats are refused: give one with --chat-template"
    assert [record.message for record in caplog.records if "template" in record.message] == [message]


def test_a_damaged_file_ends_with_one_line_and_status_1(tmp_path: Path) -> None:
    write_model(tmp_path, 300)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    done = subprocess.run(
        [PENSTOCK, "serve", tmp_path, "--port=0"], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "")
    file = tmp_path / "tokenizer.model"
    assert re.fullmatch(rf"penstock serve: {file}: is not a SentencePiece model: fetch it again, or .*\n", done.stderr)
