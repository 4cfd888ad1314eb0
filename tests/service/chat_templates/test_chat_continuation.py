"""New messages after an answer have the tokens that they have in the whole conversation."""

import json
from typing import Any

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage, TemplateToolCall
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.tokenizer import Tokenizer

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "plain": PLAIN}
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIALS += ["<start_of_turn>", "<end_of_turn>", "<s>", "</s>"]
CORPUS = ["user\nWhat is a penstock? assistant [INST] A gated pipe. [/INST] naïve 你好\n\nuser: model\n"] * 4


def byte_level():
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens(SPECIALS)
    return library


def metaspace():
    """Only the very first word gets a space in front."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    return library


@pytest.fixture(scope="module")
def libraries():
    return {"byte-level": byte_level(), "metaspace": metaspace()}


@pytest.fixture
def load(libraries, tmp_path):
    def load(template, library="byte-level"):
        libraries[library].save(str(tmp_path / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return load


def user(content):
    return TemplateMessage("user", content)


def assistant(content):
    return TemplateMessage("assistant", content)


@pytest.mark.parametrize("library", ["byte-level", "metaspace"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("question", ["A gated pipe?", " <|im_end|> \n</s>", "naïve 你好\n\n", "x"])
def test_a_turn_has_the_tokens_of_the_whole_conversation(load, template, library, question):
    tokenizer = load(TEMPLATES[template], library)
    turns = [user("What is a penstock?"), assistant("A pipe."), user(question)]
    whole = tokenizer.encode_chat(TemplateInput(turns))
    more = tokenizer.encode_chat_after(TemplateInput(turns[2:]))
    assert whole[-len(more) :] == more
    before = tokenizer.decode(whole[: -len(more)], include_special_tokens=True)
    assert before.endswith("A pipe.")
    if library == "byte-level" and template != "plain":  # whose opening lacks the space before the answer
        assert whole == tokenizer.encode_chat(TemplateInput(turns[:1])) + tokenizer.encode_after("A pipe.") + more


@pytest.mark.parametrize("template", ["chatml", "llama-3", "plain"])
def test_several_messages_of_any_role_and_no_opening(load, template):
    tokenizer = load(TEMPLATES[template])
    turns = [user("What?"), assistant("A pipe."), TemplateMessage("tool", "42"), user("So?")]
    for opens_turn in (True, False):
        more = tokenizer.encode_chat_after(TemplateInput(turns[2:], opens_turn))
        assert tokenizer.encode_chat(TemplateInput(turns, opens_turn))[-len(more) :] == more


def test_the_demo_models_template():
    tokenizer = Tokenizer(resolve_model(DEMO))
    turns = [
        user("What does a kernel do?"),
        assistant("It schedules."),
        user("How?\n"),
        assistant("Fairly."),
        user("?"),
    ]
    for end in (3, 5):
        known = tokenizer.encode_chat(TemplateInput(turns[: end - 2])) + tokenizer.encode_after(turns[end - 2].content)
        assert tokenizer.encode_chat(TemplateInput(turns[:end])) == known + tokenizer.encode_chat_after(
            TemplateInput(turns[end - 1 : end])
        )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:10] }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_show_an_answer_as_it_is_cannot_follow_one(load, template):
    with pytest.raises(ServiceError, match="send the whole conversation without continue_from") as error:
        load(template).encode_chat_after(TemplateInput([user("x")]))
    assert error.value.reason is Reason.CHAT_NOT_CONTINUABLE
    assert error.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_template_may_refuse_what_follows(load):
    with pytest.raises(ServiceError, match="roles must alternate") as error:
        load(GEMMA).encode_chat_after(TemplateInput([assistant("me again")]))
    assert error.value.field == "chat"


def test_a_text_that_follows_has_neither_a_beginning_nor_special_tokens(load):
    tokenizer = load(CHATML, "metaspace")
    assert tokenizer.decode(tokenizer.encode_after("pipe")) == "pipe"
    assert tokenizer.encode_after("pipe") != tokenizer.encode("pipe", add_special_tokens=False)
    assert tokenizer.encode_after("") == []
    tokenizer = load(CHATML)
    for text in ("<|im_start|>", "</s> pipe"):
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode_after(text))
        assert tokenizer.decode(tokenizer.encode_after(text)) == text


@pytest.mark.parametrize("with_tools", [False, True])
def test_the_demo_models_template_is_chatml_with_tools_in_the_form_of_hermes(with_tools):
    directory = resolve_model(DEMO)
    tokenizer = Tokenizer(directory)
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(directory)
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
    arguments = {"city": "Köln"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?\n"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": arguments}}] * 2,
        },
        {"role": "tool", "tool_call_id": "c", "content": "yes"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": " When?"},
    ]
    calls = [TemplateToolCall("c", "w", arguments)] * 2
    turns = [
        TemplateMessage(
            each["role"], each.get("content"), calls if "tool_calls" in each else (), each.get("tool_call_id", "")
        )
        for each in messages
    ]
    tools = [tool] if with_tools else []
    expected = reference.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_chat(TemplateInput(turns, tools=tools)) == expected
    text = tokenizer.decode(expected, include_special_tokens=True)
    assert text.count('<tool_call>\n{"name": "w", "arguments": {"city": "Köln"}}\n</tool_call>') == 2
    assert ("<tools>" in text) is with_tools
    plain = [turns[0], turns[1], turns[4], turns[5]]
    chatml = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in plain)
    assert tokenizer.render_chat(TemplateInput(plain)) == f"{chatml}<|im_start|>assistant\n"
