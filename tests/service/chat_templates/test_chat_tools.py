"""Tools, template variables and an open last message: the prompt that transformers makes, and no special tokens of a
caller's."""

import json
from pathlib import Path

import grpc
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

import penstock.v1 as pb
from penstock.service.errors import ServiceError
from penstock.service.requests.chat import check_chat, parse_chat
from penstock.service.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "templates"
SPECIALS = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama31": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
}
NAMED = {
    "qwen3": {"eos_token": "<|im_end|>"},
    "llama31": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
}
every_template = pytest.mark.parametrize("kind", SPECIALS)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather in a "city", für heute 你好',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "default": 1.5}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def write(directory, special_tokens, named, template):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(["What is the weather in a city? tool call"], trainer)
    library.add_special_tokens([AddedToken(special) for special in special_tokens])
    library.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {
        kind: write(
            tmp_path_factory.mktemp(kind), SPECIALS[kind], NAMED[kind], (TEMPLATES / f"{kind}.jinja").read_text()
        )
        for kind in SPECIALS
    }


@pytest.fixture(scope="module")
def loaded(directories):
    return {kind: Tokenizer(directory) for kind, directory in directories.items()}


@pytest.fixture(scope="module")
def references(directories):
    transformers = pytest.importorskip("transformers")
    return {kind: transformers.AutoTokenizer.from_pretrained(path) for kind, path in directories.items()}


@pytest.fixture
def load(tmp_path):
    """A tokenizer with a template of the test's own."""
    return lambda template, special_tokens=SPECIALS["qwen3"]: Tokenizer(
        write(tmp_path, special_tokens, {"eos_token": special_tokens[-1]}, template)
    )


PARAMETERS = "chat.tools[0].function.parameters_json"


def tool_of(tool):
    """The contract's form of a tool."""
    function = dict(tool["function"])
    if "parameters" in function:
        function["parameters_json"] = json.dumps(function.pop("parameters"))
    return pb.Tool(function=pb.FunctionTool(**function))


def chat_of(messages, tools=(), variables=None, **fields):
    """The contract's form of what transformers takes."""
    chat = pb.Chat(tools=map(tool_of, tools), **fields)
    if variables is not None:
        chat.template_variables_json = json.dumps(variables)
    for message in messages:
        added = chat.messages.add(
            role=message["role"],
            content=message.get("content", ""),
            tool_call_id=message.get("tool_call_id", ""),
            name=message.get("name", ""),
        )
        for call in message.get("tool_calls", ()):
            function = call["function"]
            added.tool_calls.add(
                id=call.get("id", ""), name=function["name"], arguments_json=json.dumps(function["arguments"])
            )
    return chat


def ids_of(tokenizer, chat):
    check_chat(chat, tokenizer.chat_template(bool(chat.tools)))
    return tokenizer.encode_chat(parse_chat(chat))


def text_of(tokenizer, chat):
    check_chat(chat, tokenizer.chat_template(bool(chat.tools)))
    return tokenizer.render_chat(parse_chat(chat))


def reference_of(reference, messages, tools=(), variables=None, **options):
    options = {"add_generation_prompt": not options.get("continue_final_message", False)} | options
    return reference.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=True, return_dict=False, **options, **(variables or {})
    )


def called(name, arguments, call_id="abc123XYZ"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


QUESTION = {"role": "user", "content": "Is it raining <b>in</b> Köln?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [called("get_weather", {"city": 'Köln "am" Rhein', "x": [1, None]})],
}
RESULT = {"role": "tool", "content": '{"rain": true}', "tool_call_id": "abc123XYZ", "name": "get_weather"}
CONVERSATIONS = {
    "question": [QUESTION],
    "call": [QUESTION, CALL, RESULT],
    "answered": [
        QUESTION,
        CALL,
        RESULT,
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "When?"},
    ],
}


@every_template
@pytest.mark.parametrize("tools", [(), (WEATHER,), (WEATHER, TIME)], ids=["none", "one", "two"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_tools_and_calls_have_the_tokens_that_transformers_gives_them(kind, tools, messages, loaded, references):
    expected = reference_of(references[kind], messages, tools)
    chat = chat_of(messages, tools)
    assert ids_of(loaded[kind], chat) == expected
    assert text_of(loaded[kind], chat) == references[kind].decode(expected, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True, "unknown": [1, {"a": None}]}),
        ("llama31", {"date_string": "1 Jan 2030"}),
        ("llama31", {"custom_tools": [TIME]}),
    ],
)
def test_template_variables_are_what_they_are_to_transformers(kind, variables, loaded, references):
    without = ids_of(loaded[kind], chat_of([QUESTION]))
    with_them = ids_of(loaded[kind], chat_of([QUESTION], variables=variables))
    assert with_them == reference_of(references[kind], [QUESTION], variables=variables)
    assert (with_them != without) == (variables.get("enable_thinking") is not True)


@every_template
@pytest.mark.parametrize("content", ["Yes, it", "Yes, it ", "\n Yes\n\n", "<", "a <|im_"])
def test_an_open_message_ends_as_transformers_ends_it(kind, content, loaded, references):
    messages = [QUESTION, {"role": "assistant", "content": content}]
    chat = chat_of(messages, continue_final_message=True)
    assert ids_of(loaded[kind], chat) == reference_of(references[kind], messages, continue_final_message=True)
    assert text_of(loaded[kind], chat).rstrip().endswith(content.strip())


@every_template
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet='ab <>|/_\n"\\你[]', min_size=1, max_size=12), key=st.text("ab<|>", max_size=5))
def test_any_text_without_special_tokens_has_the_tokens_of_transformers(kind, text, key, loaded, references):
    tool = {
        "type": "function",
        "function": {"name": text, "description": text, "parameters": {key: [text, {key: text}]}},
    }
    call = {"role": "assistant", "content": "", "tool_calls": [called(text, {key: text})]}
    messages = [QUESTION, call, RESULT | {"content": text}]
    assert ids_of(loaded[kind], chat_of(messages, [tool])) == reference_of(references[kind], messages, [tool])


@every_template
def test_no_text_of_a_caller_becomes_a_special_token(kind, loaded):
    tokenizer = loaded[kind]
    plain = chat_of([QUESTION, CALL, RESULT], [WEATHER], {"date_string": "x"})
    for hostile in SPECIALS[kind]:
        deep = {hostile: [{hostile: hostile}]}
        tool = {"type": "function", "function": {"name": hostile, "description": hostile, "parameters": deep}}
        call = {"role": "assistant", "content": "", "tool_calls": [called(hostile, {hostile: hostile})]}
        result = RESULT | {"content": hostile, "tool_call_id": hostile, "name": hostile}
        chat = chat_of([QUESTION, call, result], [tool], {"date_string": hostile})

        def special_tokens(chat):
            return [token_id for token_id in ids_of(tokenizer, chat) if token_id in tokenizer.special_ids]

        assert special_tokens(chat) == special_tokens(plain)
        assert hostile in text_of(tokenizer, chat)


SHOWS_ALL = (
    "<|{{ effort }}|>{{ effort }}|>{% for tool in tools %}<|im_{{ tool.function.name }}|>{% endfor %}"
    "{% for m in messages %}<|im_{{ m.name }}|>{{ m.content }}<|{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}<|im_{{ c.id }}<|{{ c.function.name }}{% for k in c.function.arguments %}"
    "<|{{ k }}{{ c.function.arguments[k] }}{% endfor %}{% endfor %}{% endfor %}"
    "{{ tools | tojson(ensure_ascii=True) }}"
)


@pytest.mark.parametrize(
    "text", ["im_start", "start", "im_start|>", "end|>", "<|im_end|>", "im_end|", " start ", "é<|im_end|>"]
)
def test_no_special_token_comes_about_with_the_templates_text(text, load):
    """Wherever a template puts what a caller says, be it into the middle of a special token."""
    tokenizer = load(SHOWS_ALL)
    tool = {"type": "function", "function": {"name": text, "description": text}}
    message = {"role": "assistant", "content": "x", "name": text, "tool_call_id": text}
    message["tool_calls"] = [called(text, {text: text}, text)]
    chat = chat_of([message], [tool], {"effort": text})
    assert not tokenizer.special_ids & set(ids_of(tokenizer, chat))
    assert f"<|{text}|>" in text_of(tokenizer, chat)
    assert json.dumps([tool], ensure_ascii=True) in text_of(tokenizer, chat)


def test_a_value_that_the_template_asks_for_reaches_it_as_it_is(load):
    """Though it be a part of a special token."""
    template = (
        "{% if effort == 'start' %}hard{% endif %}{% for t in tools %}{{ t.function.parameters.end }}{% endfor %}"
    )
    chat = chat_of([QUESTION], [{"function": {"name": "x", "parameters": {"end": "of"}}}], {"effort": "start"})
    assert text_of(load(template), chat) == "hardof"


@pytest.mark.parametrize(
    ("template", "shows"),
    [
        ("{{ messages[0].content }}", False),
        ("{% set tools = none %}x", False),
        ("{{ message.tools }}", False),
        ("{% if tools %}{{ tools }}{% endif %}", True),
        ("{% if tools is defined %}x{% endif %}", True),
        ("{% for t in tools %}{{ t }}{% endfor %}", True),
    ],
)
def test_whether_a_template_shows_tools(template, shows, load):
    assert load(template).chat_template(with_tools=True).shows_tools is shows


ANSWER = {"role": "assistant", "content": "Yes"}


def test_an_open_message_needs_no_other_field(loaded):
    for opens in (None, False):
        chat = chat_of([QUESTION, ANSWER], continue_final_message=True, add_generation_prompt=opens)
        assert text_of(loaded["qwen3"], chat).endswith("<|im_start|>assistant\nYes")


@pytest.mark.parametrize("template", ["{{ messages[-1].content | upper }}", "{{ messages[0].content }}"])
def test_a_template_that_does_not_show_the_last_message_cannot_leave_it_open(template, load):
    with pytest.raises(ServiceError) as error:
        ids_of(load(template), chat_of([QUESTION, ANSWER], continue_final_message=True))
    assert (error.value.code, error.value.field) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "chat.continue_final_message",
    )


@every_template
def test_what_continues_an_answer_may_have_tools_and_an_open_end(kind, loaded):
    """What a template says of tools before the answer is there already; what it says after it is not."""
    tokenizer = loaded[kind]
    new = {"role": "user", "content": "When?"}
    more = tokenizer.encode_chat_after(parse_chat(chat_of([new], [WEATHER])))
    whole = ids_of(tokenizer, chat_of([QUESTION, ANSWER, new], [WEATHER]))
    assert whole[-len(more) :] == more
    assert "When?" in tokenizer.decode(more)
    opened = tokenizer.encode_chat_after(parse_chat(chat_of([new, ANSWER], continue_final_message=True)))
    assert tokenizer.decode(opened).endswith("Yes")


async def test_over_a_socket(start_service, details_of, loaded, directories):
    """RenderChat shows what a request would be; each refusal names its field."""
    tokenizer = Tokenizer(directories["qwen3"])
    service = await start_service(tokenizer=tokenizer)
    chat = chat_of([QUESTION, CALL, RESULT], [WEATHER], {"enable_thinking": False})
    rendered = await service.tokenizer.RenderChat(pb.RenderChatRequest(chat=chat))
    assert rendered.text == text_of(tokenizer, chat)
    assert list(rendered.token_ids) == ids_of(tokenizer, chat)
    start = pb.GenerationStart(chat=chat, sampling=pb.SamplingParams(max_tokens=2))
    answer = await service.generation.Complete(pb.CompleteRequest(start=start))
    assert answer.finished.usage.prompt_tokens == len(rendered.token_ids)
    for bad, field in (
        (chat_of([QUESTION], variables={"tools": []}), "chat.template_variables_json"),
        (
            pb.Chat(
                messages=[pb.ChatMessage(role="user")], tools=[tool_of({"function": {"name": "x", "parameters": 1}})]
            ),
            PARAMETERS,
        ),
        (chat_of([QUESTION], continue_final_message=True), "chat.continue_final_message"),
    ):
        for call in (
            service.tokenizer.RenderChat(pb.RenderChatRequest(chat=bad)),
            service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(chat=bad))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            [violation] = details_of(error.value)["BadRequest"].field_violations
            assert violation.field == field


async def test_a_template_without_tools_refuses_them_over_a_socket(start_service, details_of):
    service = await start_service()
    chat = chat_of([QUESTION], [WEATHER])
    for call in (
        service.tokenizer.RenderChat(pb.RenderChatRequest(chat=chat)),
        service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(chat=chat))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details_of(error.value)["ErrorInfo"].reason == "NO_TOOLS_IN_TEMPLATE"
        assert "tools" in (error.value.details() or "")
