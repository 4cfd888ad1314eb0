"""What a chat template sees and has, and what becomes of one that fails or refuses."""

import json

import jinja2.sandbox
import pytest
import tokenizers

import penstock.v1 as pb
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage, TemplateToolCall
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.chat import check_chat
from penstock.service.text.tokenizer import Tokenizer


@pytest.fixture
def load(byte_tokenizer_path, tmp_path):
    """A tokenizer with a template of the test's own; <|end|> and <|turn|> are its special tokens."""

    def load(template, **config):
        (tmp_path / "tokenizer.json").write_bytes((byte_tokenizer_path / "tokenizer.json").read_bytes())
        config = config if template is None else {"chat_template": template, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return load


def test_a_template_sees_the_content_as_it_is(load):
    template = "{% set text = messages[0].content %}{{ text.split('</think>')[-1].lstrip('\\n') }}|{{ text | length }}"
    tokenizer = load(template)
    assert tokenizer.render_chat(TemplateInput([TemplateMessage("assistant", "hm</think>\n\nyes")])) == "yes|15"


def test_templates_have_what_they_are_written_for(load):
    template = (
        "{{ bos_token }}{{ {'a': 'é<'} | tojson }}\n    {% for m in messages %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}\n    {% endfor %}\n"
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
        "{{ tools is none }}"
    )
    tokenizer = load(template, bos_token={"content": "<|turn|>"})
    messages = [TemplateMessage("user", "one"), TemplateMessage("assistant", "two")]
    assert tokenizer.render_chat(TemplateInput(messages)) == '<|turn|>{"a": "é<"}\none\n4True'


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_failing_template_fails_only_its_request(template, load):
    tokenizer = load(template)
    with pytest.raises(ServiceError, match="chat: the model's chat template fails on it") as caught:
        tokenizer.encode_chat(TemplateInput([TemplateMessage("user", "secret words")]))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "secret" not in caught.value.message


REFUSES = "{{ raise_exception('Only user and assistant roles!') }}"


def refusal(tokenizer, *messages):
    with pytest.raises(ServiceError) as caught:
        tokenizer.encode_chat(TemplateInput(messages))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "chat")
    return caught.value.message


def test_a_template_may_refuse_in_words_of_its_own(load):
    said = refusal(load(REFUSES), TemplateMessage("system", "x"))
    assert said == "chat: the model's chat template refuses it: Only user and assistant roles!"
    said = refusal(load("{% set why = 'No ' 'tools.' %}{{ raise_exception(why) }}"), TemplateMessage("user", "x"))
    assert said.endswith("refuses it: No tools.")
    long = "x" * 300
    assert refusal(load(f"{{{{ raise_exception('{long}') }}}}"), TemplateMessage("user", "x")).endswith(
        f": {long[:200]}"
    )


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
    said = refusal(load(f"{{{{ raise_exception({words}) }}}}"), TemplateMessage("secret", "secret words <|end|>"))
    assert said == "chat: the model's chat template refuses it"


def test_without_a_template_there_are_no_chats(load):
    tokenizer = load(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ServiceError) as caught:
        tokenizer.encode_chat(TemplateInput([TemplateMessage("user", "x")]))
    assert caught.value.reason is Reason.NO_CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ messages[0].role }}", set()),
        ("{% for m in messages %}{% if m['role'] == 'critic' %}{% endif %}{% endfor %}", {"critic"}),
        ("{% for m in messages %}{% if m.role not in ['critic', 'user'] %}{% endif %}{% endfor %}", {"critic"}),
        ("{% set role = messages[0].role | lower %}{% if role != 'critic' %}{% endif %}", {"critic"}),
        ("{% set names = {'critic': 'x'} %}{{ names[messages[0]['role']] }}", {"critic"}),
        ("{% if messages[0].get('role') is eq 'critic' %}{% endif %}", {"critic"}),
        ("{{ messages | selectattr('role', 'equalto', 'critic') | list | length }}", {"critic"}),
        ("{% if tools[0].type == 'function' or 'name' in messages[0] %}critic{% endif %}", set()),
    ],
)
def test_a_template_names_roles_by_comparing_with_them(template, named, load):
    roles = load(template).chat_template(with_tools=False).roles
    assert roles == {"assistant", "developer", "system", "tool", "user"} | named


@pytest.mark.parametrize("role", ["User", "assistent", "function", "ipython ", "\n"])
def test_any_other_role_is_refused_with_those_that_there_are(role, load):
    tokenizer = load("{% for m in messages %}{{ m.role == 'ipython' }}{{ m.function == 'function' }}{% endfor %}")
    template = tokenizer.chat_template(with_tools=False)
    messages = [pb.ChatMessage(role="ipython", content="a"), pb.ChatMessage(role=role, content="secret")]
    with pytest.raises(ServiceError) as caught:
        check_chat(pb.Chat(messages=messages), template)
    assert caught.value.field == "chat.messages[1].role"
    assert caught.value.message.endswith("must be one of assistant, developer, ipython, system, tool, user")
    check_chat(pb.Chat(messages=messages[:1]), template)


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
MIXED = [
    TemplateMessage("system", "one"),
    TemplateMessage("user", "two"),
    TemplateMessage("developer", "three"),
    TemplateMessage("assistant", None),
    TemplateMessage("system", "four"),
]


def test_later_instructions_join_the_first_ones_where_the_template_refuses_them(load):
    strict, lenient = load(SYSTEM_FIRST), load(SYSTEM_FIRST.replace("raise_exception('system first')", "''"))
    assert strict.render_chat(TemplateInput(MIXED)) == "system:one\nthree\nfour;user:two;assistant:;"
    assert strict.render_chat(TemplateInput(MIXED[1:3])) == "system:three;user:two;"
    in_order = "system:one;user:two;system:three;assistant:;system:four;"
    assert lenient.render_chat(TemplateInput(MIXED)).replace("None", "") == in_order


def test_instructions_after_an_answer_stay_after_it_or_are_refused(load):
    strict, lenient = load(SYSTEM_FIRST), load(SYSTEM_FIRST.replace("raise_exception('system first')", "''"))
    later = TemplateInput([TemplateMessage("system", "four"), TemplateMessage("user", "five")])
    assert lenient.decode(lenient.encode_chat_after(later)) == ";system:four;user:five;"
    with pytest.raises(ServiceError, match="system first"):
        strict.encode_chat_after(later)


def test_a_refusal_is_that_of_the_messages_as_they_were_given(load):
    template = SYSTEM_FIRST + "{{ raise_exception('never') if messages[0].role == 'system' }}"
    with pytest.raises(ServiceError, match="system first"):
        load(template).render_chat(TemplateInput(MIXED[1:3]))


def test_the_developer_is_the_system_where_the_template_knows_none(load):
    chat = TemplateInput([TemplateMessage("developer", "x")])
    assert load("{{ messages[0].role }}").render_chat(chat) == "system"
    assert load("{{ messages[0].role }}{{ messages[0].role == 'developer' }}").render_chat(chat) == "developerTrue"


CALL = TemplateMessage("assistant", None, [TemplateToolCall("c", "w", {})])


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% if messages[0].content is none %}none{% else %}some{% endif %}", "none"),
        ("{% set c = messages[0]['content'] %}{% if c == none %}none{% else %}some{% endif %}", "none"),
        ("{{ messages[0].content }}|{{ messages[0].content or '' }}|{{ 'content' in messages[0] }}", "||False"),
        ("{{ 'a' + messages[0].content + 'b' }}", "ab"),  # which fails without a text
        ("{% if messages[0].content is none %}{{ raise_exception('none') }}{% endif %}taken", "taken"),
    ],
)
def test_a_call_without_content(template, rendered, load):
    assert load(template).render_chat(TemplateInput([CALL])) == rendered


def test_an_empty_content_is_no_missing_one(load):
    tokenizer = load("{{ messages[0].content is none }}{{ messages[0].content is string }}")
    assert tokenizer.render_chat(TemplateInput([CALL._replace(content="")])) == "FalseTrue"


def test_reasoning_has_the_names_that_templates_read(load):
    template = "{% for n in ['reasoning_content', 'reasoning', 'thinking'] %}{{ messages[0][n] }},{% endfor %}"
    message = TemplateMessage("assistant", "x", reasoning="hm")
    assert load(template).render_chat(TemplateInput([message])) == "hm,hm,hm,"
    assert (
        load("{{ messages[0].thinking is defined }}").render_chat(TemplateInput([TemplateMessage("assistant", "x")]))
        == "False"
    )


@pytest.mark.parametrize(
    ("shows", "rendered"),
    [
        ("{{ c.arguments }}", '{"a": '),
        ("{{ c.arguments | tojson }}", '"{\\"a\\": "'),
        ("{% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %}", 'arguments={"a": '),
        ("{% for k in c.arguments.keys() %}{{ k }}={{ c.arguments[k] }}{% endfor %}", 'arguments={"a": '),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_text(shows, rendered, load):
    message = TemplateMessage("assistant", "x", [TemplateToolCall("c", "w", '{"a": ')])
    tokenizer = load("{% set c = messages[0].tool_calls[0].function %}" + shows)
    assert tokenizer.render_chat(TemplateInput([message])) == rendered


THINKS = (
    "{% for m in messages %}<|turn|>{% set content = m.content %}{% if '</think>' in content %}"
    "<think>{{ content.split('</think>')[0].split('<think>')[-1] }}</think>{{ content.split('</think>')[-1] }}"
    "{% else %}{{ content }}{% endif %}{{ content | length }}{{ content[:3] }}{{ content.endswith('<|end|>') }}"
    "{{ content == '<|end|>' }}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    "content", ["<think>hm</think>yes", "a</think>b</think>c", "<|end|>", "x<|end|>", "<|en", "|>", "</thi", "ok"]
)
def test_a_template_that_tests_for_special_tokens_sees_the_content_as_it_is(content, byte_tokenizer_path, tmp_path):
    """And what the template does not write itself is no special token."""
    library = tokenizers.Tokenizer.from_file(str(byte_tokenizer_path / "tokenizer.json"))
    library.add_special_tokens(["<think>", "</think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": THINKS}))
    tokenizer = Tokenizer(tmp_path)
    chat = TemplateInput([TemplateMessage("assistant", content)])
    expected = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(THINKS)
    assert tokenizer.render_chat(chat) == expected.render(messages=[{"role": "assistant", "content": content}])
    splits = "</think>" in content
    turn, end, opens, closes = map(library.token_to_id, ("<|turn|>", "<|end|>", "<think>", "</think>"))
    special_tokens = [token_id for token_id in tokenizer.encode_chat(chat) if token_id in tokenizer.special_ids]
    assert special_tokens == [turn, *([opens, closes] if splits else []), end]
