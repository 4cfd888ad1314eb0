"""What a chat template sees and has, and what becomes of one that fails or refuses."""

import json

import pytest

from penstock.service.errors import Reason, ServiceError
from penstock.service.tokenizer import Chat, Message, Tokenizer


@pytest.fixture
def load(byte_tokenizer_path, tmp_path):
    """A tokenizer with a template of the test's own; <|end|> and <|turn|> are its special tokens."""

    def load(template, **config):
        (tmp_path / "tokenizer.json").write_bytes((byte_tokenizer_path / "tokenizer.json").read_bytes())
        config = config if template is None else {"chat_template": template, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(tmp_path)

    return load


def test_a_template_sees_the_content_as_it_is(load):
    template = "{% set text = messages[0].content %}{{ text.split('</think>')[-1].lstrip('\\n') }}|{{ text | length }}"
    tokenizer = load(template)
    assert tokenizer.render_chat(Chat([Message("assistant", "hm</think>\n\nyes")])) == "yes|15"


def test_templates_have_what_they_are_written_for(load):
    template = (
        "{{ bos_token }}{{ {'a': 'é<'} | tojson }}\n    {% for m in messages %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}\n    {% endfor %}\n"
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
        "{{ tools is none }}"
    )
    tokenizer = load(template, bos_token={"content": "<|turn|>"})
    messages = [Message("user", "one"), Message("assistant", "two")]
    assert tokenizer.render_chat(Chat(messages)) == '<|turn|>{"a": "é<"}\none\n4True'


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_fails_one_request_alone(template, load):
    tokenizer = load(template)
    with pytest.raises(ServiceError, match="chat: the model's chat template fails on it") as caught:
        tokenizer.encode_chat(Chat([Message("user", "secret words")]))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "secret" not in caught.value.message


REFUSES = "{{ raise_exception('Only user and assistant roles!') }}"


def refusal(tokenizer, *messages):
    with pytest.raises(ServiceError) as caught:
        tokenizer.encode_chat(Chat(messages))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "chat")
    return caught.value.message


def test_a_template_may_refuse_in_words_of_its_own(load):
    said = refusal(load(REFUSES), Message("system", "x"))
    assert said == "chat: the model's chat template refuses it: Only user and assistant roles!"
    said = refusal(load("{% set why = 'No ' 'tools.' %}{{ raise_exception(why) }}"), Message("user", "x"))
    assert said.endswith("refuses it: No tools.")
    long = "x" * 300
    assert refusal(load(f"{{{{ raise_exception('{long}') }}}}"), Message("user", "x")).endswith(f": {long[:200]}")


@pytest.mark.parametrize(
    "words",
    [
        "'not after ' ~ messages[0].content",
        "messages[0].content",
        "'%s' | format(messages[0].content)",
        "messages[0].role ~ 'is none'",
        "messages",
    ],
)
def test_what_the_caller_wrote_is_in_no_refusal(words, load):
    """A status is no place for prompts, and a template may put them anywhere."""
    said = refusal(load(f"{{{{ raise_exception({words}) }}}}"), Message("secret", "secret words <|end|>"))
    assert said == "chat: the model's chat template refuses it"


def test_without_a_template_there_are_no_chats(load):
    tokenizer = load(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ServiceError) as caught:
        tokenizer.encode_chat(Chat([Message("user", "x")]))
    assert caught.value.reason is Reason.NO_CHAT_TEMPLATE
