"""What ``tool_choice``, strict tools and parsing are refused for, by field, and what they make of a request."""

import json

import grpc
import pytest
from thinker import write_thinker

import penstock.v1 as pb
from penstock.models.structured_output.compiler import compile_grammar, read_tokenizer, to_grammar
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import ServiceError
from penstock.service.requests import chat as chat_module
from penstock.service.requests.answer_formats import AnswerFormats, OutputFormats, find_formats
from penstock.service.requests.chat import ToolSchemas, parse_chat
from penstock.service.requests.tool_choice import CallConstraints
from penstock.service.text.tokenizer import Tokenizer

HERMES = AnswerFormats(OutputFormats("hermes", "think"), OutputFormats("hermes", "think"))
PYTHONIC = AnswerFormats(OutputFormats("pythonic"), OutputFormats("pythonic"))
UNKNOWN = AnswerFormats()
SCHEMA = {"type": "object", "properties": {"only": {"type": "null"}}}
REQUIRED, NONE = pb.TOOL_CHOICE_MODE_REQUIRED, pb.TOOL_CHOICE_MODE_NONE


def tool(name="look", strict=None, parameters=None):
    given = json.dumps(SCHEMA if parameters is None else parameters)
    return pb.Tool(function=pb.FunctionTool(name=name, parameters_json=given, strict=strict))


def start_of(*tools, mode=None, function=None, **fields):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], tools=tools)
    if function is not None:
        chat.tool_choice.function = function
    if mode is not None:
        chat.tool_choice.mode = mode
    return pb.GenerationStart(chat=chat, **fields)


def refused(start, formats=HERMES):
    calls = CallConstraints(formats)
    assert calls.applies(start)

    def constraint():
        calls.check(start)
        return calls.constraint(start, ToolSchemas(start.chat))

    with pytest.raises(ServiceError) as error:
        constraint()
    assert error.value.message.startswith(f"{error.value.field}: ")
    return error.value.field


def test_what_cannot_be_forced_is_refused_by_name():
    assert refused(start_of(mode=REQUIRED)) == "chat.tool_choice"
    assert refused(start_of(tool(), function="other")) == "chat.tool_choice"
    constrained = start_of(tool(), mode=REQUIRED, constraint=pb.Constraint(regex="a"))
    assert refused(constrained) == "chat.tool_choice"
    assert refused(start_of(tool(), mode=REQUIRED), UNKNOWN) == "chat.tools"
    endless = start_of(tool("a"), tool(), function="look", sampling=pb.SamplingParams(ignore_eos=True))
    assert refused(endless) == "chat.tools[1].function.parameters_json"
    no_object = pb.Tool(function=pb.FunctionTool(name="b", parameters_json="[]"))
    assert refused(start_of(tool("a"), no_object, mode=REQUIRED)) == "chat.tools[1].function.parameters_json"
    odd = tool(parameters={"properties": {"from": {}}})
    assert refused(start_of(odd, mode=REQUIRED), PYTHONIC) == "chat.tools"


def test_only_the_chosen_function_is_in_the_grammar():
    calls = CallConstraints(HERMES)
    start = start_of(tool("first"), tool("second"), function="second")
    one = calls.constraint(start, ToolSchemas(start.chat)).lark
    assert ("first" in one, "second" in one) == (False, True)
    start = start_of(tool("a"), tool("b"), mode=REQUIRED)
    many = calls.constraint(start, ToolSchemas(start.chat)).lark
    start = start_of(tool("a"), tool("b"), mode=REQUIRED)
    start.chat.parallel_tool_calls = False
    assert many.count("marked)*") == 1
    assert "marked)*" not in calls.constraint(start, ToolSchemas(start.chat)).lark


@pytest.mark.parametrize(
    ("formats", "fields", "applies"),
    [
        (HERMES, {}, True),
        (HERMES, {"mode": NONE}, False),
        (HERMES, {"constraint": pb.Constraint(regex="a")}, False),
        (HERMES, {"constraint": pb.Constraint(start=pb.CONSTRAINT_START_FIRST_TOKEN)}, True),
        (PYTHONIC, {}, False),
        (UNKNOWN, {}, False),
    ],
)
def test_strict_tools_are_constrained_where_that_is_possible(formats, fields, applies):
    calls = CallConstraints(formats)
    start = start_of(tool("a"), tool("b", strict=True), **fields)
    assert calls.applies(start) == applies
    assert not calls.applies(start_of(tool("a"), **fields))
    if applies:
        assert '"only"' in calls.constraint(start, ToolSchemas(start.chat)).lark


def test_tools_are_hidden_where_none_may_be_called():
    assert parse_chat(start_of(tool()).chat).tools
    assert not parse_chat(start_of(tool(), mode=NONE).chat).tools


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n<think>\n{% endif %}"
)
SAID = 'Hm.</think>Well. <tool_call>{"name": "look", "arguments": {"at": "ü"}}</tool_call>'


@pytest.fixture
async def service(start_service, write_tokenizer, tmp_path):
    """A service whose model says the same whatever it is asked."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, TEMPLATE))
    begins: dict[int, int] = {}

    def say(history, sampling):
        said = len(history) - begins.setdefault(sampling.seed, len(history))
        return [*SAID.encode(), 256][min(said, len(SAID.encode()))]

    return await start_service(tokenizer=tokenizer, executor=FakeExecutor(vocab_size=258, next_token=say))


BOTH = pb.OutputOptions(parse_reasoning=True, parse_tool_calls=True)


async def complete(service, start):
    response = await service.generation.Complete(pb.CompleteRequest(start=start))
    return response.choices[0], response.finished


def test_markers_in_angle_brackets_are_tokens(tmp_path, byte_tokenizer):
    """Also if the tokenizer does not mark them as special, as in Qwen's: the grammar library does not treat them as
    text."""
    marks = ("<tool_call>", "</tool_call>", "plain")
    tokenizer = Tokenizer(write_thinker(tmp_path, byte_tokenizer.directory, "", marks))
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.marker_ids == {"<|end|>": 256, "<|turn|>": 257, "<tool_call>": 258, "</tool_call>": 259}
    formats = find_formats(tokenizer, "hermes")
    start = start_of(tool(), function="look")
    lark = CallConstraints(formats).constraint(start, ToolSchemas(start.chat)).lark
    facts = tokenizer.facts
    library = read_tokenizer(str(tmp_path), facts.special_tokens, facts.num_ids, facts.eos_token_ids)
    matcher = compile_grammar(library, to_grammar("lark", lark, tokenizer.marker_ids)).deep_copy()
    call = [258, *b'\n{"name": "look", "arguments": {}}\n', 259]
    assert matcher.consume_tokens(call)
    assert matcher.is_accepting()
    for text in ("<tool_call>", "<|turn|>"):
        choices = to_grammar("choices", json.dumps([f"{text}a"]), tokenizer.marker_ids)
        assert compile_grammar(library, choices).deep_copy().consume_tokens([*text.encode(), ord("a")])


async def test_over_a_socket(service):
    """Which of an output's parts is where, by what is asked for."""
    model = (await service.model.GetModel(pb.GetModelRequest())).model
    assert (model.tool_call_parser, model.reasoning_parser) == ("hermes", "think")
    choice, finished = await complete(service, start_of(tool(), output=BOTH))
    (call,) = choice.tool_calls
    assert (choice.text, choice.reasoning, call.name, call.arguments_json) == ("Well.", "Hm.", "look", '{"at": "ü"}')
    assert call.id.startswith("call_")
    assert choice.end.reason == finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert choice.end.stop_token_id == 256
    assert finished.usage.reasoning_tokens == len("Hm.")
    plain, finished = await complete(service, start_of(tool()))
    assert (plain.text, plain.reasoning, len(plain.tool_calls)) == (SAID, "", 0)
    assert (finished.reason, finished.usage.reasoning_tokens) == (pb.FINISH_REASON_STOP, 0)
    thought, _ = await complete(service, start_of(tool(), output=pb.OutputOptions(parse_reasoning=True)))
    assert (thought.text, thought.reasoning) == (SAID.removeprefix("Hm.</think>"), "Hm.")
    assert thought.end.reason == pb.FINISH_REASON_STOP
    hidden, _ = await complete(service, start_of(tool(), mode=NONE, output=BOTH))
    assert (hidden.text, len(hidden.tool_calls)) == (thought.text, 0)


async def test_a_schema_is_parsed_once(service, monkeypatch):
    """The template, the grammar of the forced call and the parser of the output use the same."""
    parsed = []
    parse = chat_module._parsed

    def noting(text):
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(chat_module, "_parsed", noting)
    start = start_of(tool(), mode=REQUIRED, output=BOTH)
    text = start.chat.tools[0].function.parameters_json
    await service.generation.GenerateOne(pb.GenerateOneRequest(start=start)).read()
    assert parsed.count(text) == 1


async def test_every_choice_is_parsed_on_a_stream(service):
    start = start_of(tool(), ref=1, output=BOTH, sampling=pb.SamplingParams(n=3, temperature=1, seed=5))
    stream = service.generation.Generate(iter([pb.GenerateRequest(start=start)]))
    deltas, usage = [], pb.Usage()
    async for message in stream:
        deltas += message.deltas
        for finished in message.finished:
            usage = finished.usage
    for choice in range(3):
        mine = [delta for delta in deltas if delta.choice == choice]
        assert "".join(delta.text for delta in mine) == "Well."
        assert "".join(delta.reasoning for delta in mine) == "Hm."
        calls = [call for delta in mine for call in delta.tool_calls]
        assert [call.name for call in calls if call.id] == ["look"]
        assert "".join(call.arguments_json for call in calls) == '{"at": "ü"}'
        assert calls[0].text_offset == len("Well.")
    assert usage.reasoning_tokens == 3 * len("Hm.")


async def test_a_prompt_is_computed_ahead_without_its_constraint(service):
    start = start_of(tool(parameters={"not": {}}), mode=REQUIRED)
    assert (await service.generation.Prefetch(pb.PrefetchRequest(start=start))).prompt_tokens > 0


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (pb.GenerationStart(text="x", output=BOTH), "output.parse_tool_calls"),
        (
            start_of(output=pb.OutputOptions(parse_reasoning=True, format=pb.OUTPUT_FORMAT_TOKEN_IDS)),
            "output.parse_reasoning",
        ),
        (
            start_of(output=pb.OutputOptions(parse_tool_calls=True, format=pb.OUTPUT_FORMAT_TOKEN_IDS)),
            "output.parse_tool_calls",
        ),
        (start_of(tool(), function="other"), "chat.tool_choice"),
        (start_of(mode=REQUIRED), "chat.tool_choice"),
        (start_of(tool(), mode=9), "chat.tool_choice.mode"),
        (start_of(tool(parameters={"not": {}}), mode=REQUIRED), "chat.tools[0].function.parameters_json"),
        (start_of(tool(parameters={"not": {}}), tool("b"), mode=REQUIRED), "chat.tools"),
        (start_of(constraint=pb.Constraint(start=pb.CONSTRAINT_START_FIRST_TOKEN)), "constraint"),
    ],
)
async def test_bad_input_is_refused_by_name(service, details_of, start, field):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(service, start)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details_of(error.value)["BadRequest"].field_violations
    assert violation.field == field
    assert (error.value.details() or "").startswith(f"{field}: ")


async def test_tools_of_an_unknown_format_are_refused_where_they_are_parsed(start_service, write_tokenizer, tmp_path):
    template = "{{ tools }}{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    service = await start_service(tokenizer=Tokenizer(write_tokenizer(tmp_path, template)))
    sampling = pb.SamplingParams(max_tokens=2)
    assert (await complete(service, start_of(tool(), sampling=sampling)))[0].text
    assert (await complete(service, start_of(tool(), mode=NONE, output=BOTH, sampling=sampling)))[0].text
    with pytest.raises(grpc.aio.AioRpcError, match="--tool-call-parser"):
        await complete(service, start_of(tool(), output=BOTH))
