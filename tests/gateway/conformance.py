"""What the HTTP gateway does with each field of OpenAI's chat and completion requests, and with those that vLLM adds:
a case has a request, and what must hold of its answer. Run as a script it prints the table of docs/http.md.

Each case is run whole and streamed, and the two answers must be one. The model is the demo: 4,096 tokens, 4095 ends an
answer.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

END = 4095
WORD, OTHER_WORD = 1000, 500
"""Of the demo's tokens " first" and " ver"."""
ALWAYS = {str(WORD): 100}
"""A bias that leaves one token to choose."""
NUM_TOKENS = 12
QUESTION = "What is a kernel?"
UNKNOWN = "temprature"
"""A typing error."""
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS, "seed": 7},
    "completions": {"prompt": "The kernel is", "max_tokens": NUM_TOKENS, "seed": 7},
}
"""What a case's fields are added to."""


@dataclass
class Choice:
    """One choice, put together from however many parts it came in."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Names and arguments."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[str] = dataclasses.field(default_factory=list)
    """As the logprobs name them."""
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top: list[list[tuple[str, float]]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)


@dataclass
class Answer:
    """An answer, without what no two of them share."""

    model: str = ""
    choices: list[Choice] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Any] = dataclasses.field(default_factory=list)
    request_id: str = dataclasses.field(default="", compare=False)

    @property
    def text(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.text

    @property
    def end(self) -> tuple[str | None, str | int | None]:
        """How the only choice ended, and by what."""
        (choice,) = self.choices
        return choice.finish_reason, choice.stop_reason


Ask = Callable[..., Answer]
"""Sends the case's request again, with these fields changed."""
Holds = Callable[[Answer, Ask], None]


NO_OPTIONS = {"stream_options": None}


class Support(Enum):
    """What becomes of a field."""

    DONE = "yes"
    IGNORED = "accepted, changes nothing"
    REFUSED = "refused with 400"


@dataclass(frozen=True)
class Case:
    """One thing that a field does."""

    field: str
    what: str
    """For the reader of the documentation."""
    body: dict[str, Any]
    holds: Holds | None = None
    """None where an answer, or the refusal, says it all."""
    support: Support = Support.DONE
    endpoints: tuple[str, ...] = ("chat", "completions")
    status: int = 400
    """Of a refusal."""
    service: str = "demo"
    """Or "scripted", whose model says what it is told to."""
    streams: bool = True
    whole: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is changed where the answer is not streamed."""

    @property
    def name(self) -> str:
        """Of its test."""
        return f"{self.field}: {self.what}"


def limits_the_output(answer: Answer, ask: Ask) -> None:
    assert (answer.output_tokens, answer.end) == (5, ("length", None))


def is_greedy(answer: Answer, ask: Ask) -> None:
    greedy = ask(temperature=0, top_p=None, top_k=None, min_p=None, seed=None)
    assert answer.text == greedy.text
    assert answer.text == ask(seed=8).text


def repeats_with_its_seed(answer: Answer, ask: Ask) -> None:
    assert ask().text == answer.text
    assert ask(seed=8).text != answer.text


def differs_without(name: str) -> Holds:
    def differs(answer: Answer, ask: Ask) -> None:
        assert ask(**{name: None}).text != answer.text

    return differs


def has_three_choices(answer: Answer, ask: Ask) -> None:
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.output_tokens == 3 * NUM_TOKENS


def is_the_word(answer: Answer, ask: Ask) -> None:
    assert answer.text == " first" * NUM_TOKENS


def has_two_words_alone(answer: Answer, ask: Ask) -> None:
    assert set(answer.text.split()) <= {"first", "ver"}


def stops_at(reason: str | int | None, output_tokens: int, text: str = "") -> Holds:
    def stops(answer: Answer, ask: Ask) -> None:
        assert (answer.text, answer.end, answer.output_tokens) == (text, ("stop", reason), output_tokens)

    return stops


def goes_on(answer: Answer, ask: Ask) -> None:
    assert (answer.output_tokens, answer.end) == (NUM_TOKENS, ("length", None))


def lacks_the_word(answer: Answer, ask: Ask) -> None:
    assert answer.text
    assert "first" not in answer.text


def has_five_tokens(answer: Answer, ask: Ask) -> None:
    assert (answer.output_tokens, answer.end) == (5, ("stop", None))


def has_sixteen_tokens(answer: Answer, ask: Ask) -> None:
    assert answer.output_tokens == 16


def has_logprobs(num_top: int) -> Holds:
    def has(answer: Answer, ask: Ask) -> None:
        (choice,) = answer.choices
        assert "".join(choice.tokens) == choice.text
        assert len(choice.logprobs) == len(choice.tokens) == NUM_TOKENS
        assert all(value is not None and -50 < value <= 0 for value in choice.logprobs)
        for token, logprob, top in zip(choice.tokens, choice.logprobs, choice.top, strict=True):
            best = dict(top[:num_top])
            assert len(top) in (num_top, num_top + 1)  # completions add the chosen one
            assert list(best.values()) == sorted(best.values(), reverse=True)
            assert best.get(token, logprob) == logprob
            assert sum(map(math.exp, best.values())) < 1.0001

    return has


def has_no_logprobs(answer: Answer, ask: Ask) -> None:
    assert answer.choices[0].logprobs == []


def has_token_ids(answer: Answer, ask: Ask) -> None:
    assert answer.choices[0].token_ids == [WORD] * NUM_TOKENS
    assert len(answer.prompt_token_ids) == answer.prompt_tokens


def names_tokens_by_id(answer: Answer, ask: Ask) -> None:
    assert answer.choices[0].tokens == [f"token_id:{WORD}"] * NUM_TOKENS


def has_prompt_logprobs(answer: Answer, ask: Ask) -> None:
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert len(rest) == answer.prompt_tokens - 1
    for entry in rest:
        assert 1 <= len(entry) <= 2
        assert all(token["logprob"] <= 0 for token in entry.values())


def shows_the_end(answer: Answer, ask: Ask) -> None:
    assert answer.text == "<|im_end|>" * NUM_TOKENS


def shows_no_end(answer: Answer, ask: Ask) -> None:
    assert answer.text == ""


def begins_with_the_prompt(answer: Answer, ask: Ask) -> None:
    assert answer.text.startswith("The kernel is")
    assert ask(echo=None).text == answer.text.removeprefix("The kernel is")


def has_two_prompts(answer: Answer, ask: Ask) -> None:
    first, second = answer.choices
    assert first.text == ask(prompt="The kernel is").text
    assert second.text == ask(prompt="A shell").text


def has_equal_choices(answer: Answer, ask: Ask) -> None:
    first, second = answer.choices
    assert first == second
    assert answer.prompt_tokens == 6


def reads_as_the_text(answer: Answer, ask: Ask) -> None:
    assert answer.text == ask(prompt="The kernel is").text
    assert answer.prompt_tokens == 3


def reads_as_one_string(answer: Answer, ask: Ask) -> None:
    assert answer == ask(messages=[{"role": "user", "content": "What is a\nkernel?"}])


def reads_as_system(answer: Answer, ask: Ask) -> None:
    (_, question) = ROLES
    assert answer == ask(messages=[{"role": "system", "content": "Be brief."}, question])


def has_a_shorter_prompt(answer: Answer, ask: Ask) -> None:
    """The end of the last turn and the beginning of the assistant's are not there."""
    ended = {"continue_final_message": None, "add_generation_prompt": None}
    assert answer.prompt_tokens < ask(**ended).prompt_tokens


def begins_with_the_message(answer: Answer, ask: Ask) -> None:
    assert answer.text == "The kernel is" + ask(echo=None).text


def scores_the_prompt(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert "".join(choice.tokens) == choice.text
    assert choice.text.startswith("The kernel is")
    assert choice.logprobs[0] is None
    assert choice.offsets[:4] == [0, 3, 10, 13]
    assert len(choice.tokens) == answer.prompt_tokens + NUM_TOKENS


def makes_nothing(answer: Answer, ask: Ask) -> None:
    assert (answer.text, answer.output_tokens, answer.prompt_tokens) == ("The kernel is", 0, 3)


def has_a_call(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert choice.calls == [("weather", '{"city": "Köln"}')]
    assert (choice.text, choice.finish_reason) == ("", "tool_calls")


def has_two_calls(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert [name for name, _ in choice.calls] == ["weather", "time"]


def leaves_it_in_the_text(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert (choice.calls, choice.text, choice.finish_reason) == ([], CALL, "stop")


def has_reasoning(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert (choice.reasoning, choice.text) == ("Well.", "Yes.")


def has_no_reasoning(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert (choice.reasoning, choice.text) == ("", "Yes.")


def says(text: str) -> dict[str, Any]:
    """A request for the model that says what it is told to."""
    return {"messages": [{"role": "user", "content": f"SAY {text}"}], "max_tokens": None, "tools": TOOLS}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
REASONED = "<think>Well.</think>Yes."
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "time")]
ROLES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
OPEN = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The kernel is"}]
CONTINUED = {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": False}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is a"}, {"type": "text", "text": "kernel?"}]}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}
CHAT, COMPLETIONS = ("chat",), ("completions",)
IGNORED, REFUSED = Support.IGNORED, Support.REFUSED

SAMPLING = (
    Case("max_tokens", "the most tokens of a choice", {"max_tokens": 5}, limits_the_output),
    Case("temperature", "0 takes the likeliest token", {"temperature": 0}, is_greedy),
    Case("temperature", "what is out of bounds", {"temperature": -1}, support=REFUSED),
    Case("top_p", "a small sum leaves the likeliest token", {"top_p": 1e-6}, is_greedy),
    Case("top_k", "1 leaves the likeliest token", {"top_k": 1}, is_greedy),
    Case("top_k", "-1 is all", {"top_k": -1}, repeats_with_its_seed),
    Case("min_p", "1 leaves the likeliest token", {"min_p": 1}, is_greedy),
    Case("seed", "makes it repeatable", {}, repeats_with_its_seed),
    Case("seed", "negative ones too", {"seed": -7}, repeats_with_its_seed),
    Case("n", "so many choices", {"n": 3}, has_three_choices),
    Case("n", "0", {"n": 0}, support=REFUSED),
    *(
        Case(name, "keeps from repeating", {**GREEDY, name: 2}, differs_without(name))
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    ),
    Case("logit_bias", "makes a token certain", {"logit_bias": ALWAYS}, is_the_word),
    Case("logit_bias", "keys that are no token ids", {"logit_bias": {"first": 1}}, support=REFUSED),
    Case("allowed_token_ids", "only these tokens", {"allowed_token_ids": [WORD, OTHER_WORD]}, has_two_words_alone),
    Case("bad_words", "not these words", {"bad_words": ["first"], "logit_bias": ALWAYS}, lacks_the_word),
    Case("stop", "a string", {"stop": " first", "logit_bias": ALWAYS}, stops_at(" first", 1)),
    Case("stop", "several", {"stop": ["x", "st fi"], "logit_bias": ALWAYS}, stops_at("st fi", 2, " fir")),
    Case("include_stop_str_in_output", "keeps it in the text",
         {"stop": "st f", "include_stop_str_in_output": True, "logit_bias": ALWAYS}, stops_at("st f", 2, " first f")),
    Case("stop_token_ids", "ends at these tokens", {"stop_token_ids": [WORD], "logit_bias": ALWAYS}, stops_at(WORD, 1)),
    Case("min_tokens", "no end before so many", {"min_tokens": 4, "logit_bias": {str(END): 100}}, has_five_tokens),
    Case("ignore_eos", "goes on past the end", {"ignore_eos": True, "logit_bias": {str(END): 100}}, goes_on),
    Case("ignore_eos", "without it the end ends", {"logit_bias": {str(END): 100}}, stops_at(None, 1)),
    Case("skip_special_tokens", "false shows them",
         {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {str(END): 100}}, shows_the_end),
    Case("skip_special_tokens", "they are left out",
         {"skip_special_tokens": True, "ignore_eos": True, "logit_bias": {str(END): 100}}, shows_no_end),
    Case("prompt_logprobs", "of the prompt's tokens", {"prompt_logprobs": 1}, has_prompt_logprobs, streams=False),
    Case("prompt_logprobs", "with stream", {"prompt_logprobs": 1, "stream": True}, support=REFUSED),
    Case("return_token_ids", "of prompt and output", {"return_token_ids": True, "logit_bias": ALWAYS}, has_token_ids),
    Case("priority", "lower runs first, under --scheduling-policy priority", {"priority": -5}),
    Case("request_id", "for the service's logs", {"request_id": "mine-1"}, support=IGNORED),
    Case("stream_options", "include_usage: a last chunk with the usage", {}),
    Case("stream_options", "without stream", {"stream_options": {}, "stream": False}, support=REFUSED),
    Case("stream_options", "continuous_usage_stats: usage so far, with each chunk",
         {"stream_options": {"continuous_usage_stats": True}}, whole=NO_OPTIONS),
    Case("model", "the served model's name, or none", {"model": "demo"}),
    Case("model", "another (404)", {"model": "nobody"}, support=REFUSED, status=404),
    Case("user", "", {"user": "me"}, support=IGNORED),
    Case(UNKNOWN, "what nobody knows", {UNKNOWN: 1}, support=REFUSED),
    *(
        Case(name, "", {name: value}, support=REFUSED)
        for name, value in {
            "cache_salt": "x", "guided_choice": ["a"], "guided_decoding_backend": "a", "guided_grammar": "a",
            "guided_json": {}, "guided_regex": "a", "guided_whitespace_pattern": "a", "kv_transfer_params": {"a": 1},
            "length_penalty": 2.0, "logits_processors": ["a"], "repetition_detection": {"a": 1},
            "spaces_between_special_tokens": False, "structural_tag": "a", "structured_outputs": {"regex": "a"},
            "truncate_prompt_tokens": 5, "use_beam_search": True, "vllm_xargs": {"a": 1},
        }.items()
    ),
)  # fmt: skip

OF_CHAT = (
    Case("messages", "text", {}, repeats_with_its_seed),
    Case("messages", "parts of a content are lines", {"messages": PARTS}, reads_as_one_string),
    Case("messages", "developer is system", {"messages": ROLES}, reads_as_system),
    Case("messages", "images, sound", {"messages": IMAGE}, support=REFUSED),
    Case("messages", "an empty list", {"messages": []}, support=REFUSED),
    Case("max_completion_tokens", "the newer name of max_tokens",
         {"max_tokens": None, "max_completion_tokens": 5}, limits_the_output),
    Case("logprobs", "of each token", {"logprobs": True}, has_logprobs(0)),
    Case("logprobs", "false", {"logprobs": False}, has_no_logprobs),
    Case("top_logprobs", "and alternatives", {"logprobs": True, "top_logprobs": 3}, has_logprobs(3)),
    Case("top_logprobs", "more than 20", {"logprobs": True, "top_logprobs": 21}, support=REFUSED),
    Case("return_tokens_as_token_ids", "names tokens by their ids",
         {"logprobs": True, "return_tokens_as_token_ids": True, "logit_bias": ALWAYS}, names_tokens_by_id),
    Case("tools", "a call, where the chat template shows tools", says(CALL), has_a_call, service="scripted"),
    Case("tools", "several calls", says(CALL + OTHER_CALL), has_two_calls, service="scripted"),
    Case("tools", "where the template shows none", {"tools": TOOLS}, support=REFUSED),
    Case("tool_choice", "auto", {**says(CALL), "tool_choice": "auto"}, has_a_call, service="scripted"),
    Case("tool_choice", "none: text stays text", {**says(CALL), "tool_choice": "none"}, leaves_it_in_the_text,
         service="scripted"),
    Case("tool_choice", "required", {**says(CALL), "tool_choice": "required"}, support=REFUSED, service="scripted"),
    Case("tool_choice", "a named function",
         {**says(CALL), "tool_choice": {"type": "function", "function": {"name": "time"}}}, support=REFUSED,
         service="scripted"),
    Case("parallel_tool_calls", "false keeps the first call alone",
         {**says(CALL + OTHER_CALL), "parallel_tool_calls": False}, has_a_call, service="scripted"),
    Case("include_reasoning", "reasoning has a field of its own", says(REASONED), has_reasoning, service="scripted"),
    Case("include_reasoning", "false leaves it out", {**says(REASONED), "include_reasoning": False}, has_no_reasoning,
         service="scripted"),
    Case("response_format", "text", {"response_format": {"type": "text"}}),
    Case("response_format", "json_object", {"response_format": {"type": "json_object"}}, support=REFUSED),
    Case("response_format", "json_schema", {"response_format": SCHEMA}, support=REFUSED),
    Case("continue_final_message", "the output goes on with it", CONTINUED, has_a_shorter_prompt),
    Case("echo", "puts that message before the output", {**CONTINUED, "echo": True}, begins_with_the_message),
    Case("add_generation_prompt", "false opens no turn", {"add_generation_prompt": False}, has_a_shorter_prompt),
    Case("add_special_tokens", "false: the template has them", {"add_special_tokens": False}),
    Case("add_special_tokens", "true", {"add_special_tokens": True}, support=REFUSED),
    Case("chat_template_kwargs", "variables of the template", {"chat_template_kwargs": {"enable_thinking": False}}),
    Case("reasoning_effort", "a variable of the template", {"reasoning_effort": "low"}),
    Case("documents", "a variable of the template", {"documents": [{"text": "a"}]}),
    *(
        Case(name, "", {name: value}, support=IGNORED, endpoints=CHAT)
        for name, value in {
            "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "a"}, "prompt_cache_key": "a",
            "prompt_cache_options": {}, "prompt_cache_retention": "24h", "safety_identifier": "a",
            "service_tier": "auto", "store": True,
        }.items()
    ),
    *(
        Case(name, "", {name: value}, support=REFUSED, endpoints=CHAT)
        for name, value in {
            "audio": {"voice": "alloy", "format": "wav"}, "chat_template": "{{ messages }}", "function_call": "auto",
            "functions": [{"name": "f"}], "mm_processor_kwargs": {"a": 1}, "modalities": ["audio"],
            "moderation": {"model": "a"}, "thinking_token_budget": 5, "verbosity": "low", "web_search_options": {},
        }.items()
    ),
)  # fmt: skip

OF_COMPLETIONS = (
    Case("prompt", "text", {}, repeats_with_its_seed),
    Case("prompt", "token ids", {"prompt": [531, 924, 296]}, reads_as_the_text),
    Case("prompt", "several texts", {"prompt": ["The kernel is", "A shell"]}, has_two_prompts),
    Case("prompt", "several lists of ids", {"prompt": [[531, 924, 296], [531, 924, 296]]}, has_equal_choices),
    Case("prompt", "an empty list", {"prompt": []}, support=REFUSED),
    Case("max_tokens", "16 unless given", {"max_tokens": None}, has_sixteen_tokens),
    Case("logprobs", "of each token, and alternatives", {"logprobs": 3}, has_logprobs(3)),
    Case("logprobs", "more than 20", {"logprobs": 21}, support=REFUSED),
    Case("return_tokens_as_token_ids", "names tokens by their ids",
         {"logprobs": 1, "return_tokens_as_token_ids": True, "logit_bias": ALWAYS}, names_tokens_by_id),
    Case("echo", "puts the prompt before the output", {"echo": True}, begins_with_the_prompt),
    Case("echo", "with logprobs those of the prompt", {"echo": True, "logprobs": 1}, scores_the_prompt),
    Case("echo", "with max_tokens 0 alone", {"echo": True, "max_tokens": 0}, makes_nothing),
    Case("add_special_tokens", "whether the tokenizer adds its own", {"add_special_tokens": False}),
    Case("best_of", "as many as n", {"best_of": 3, "n": 3}, has_three_choices),
    Case("best_of", "more than n", {"best_of": 3}, support=REFUSED),
    Case("suffix", "", {"suffix": "the end"}, support=REFUSED),
)  # fmt: skip

CASES = (
    *SAMPLING,
    *(replace(case, endpoints=CHAT) for case in OF_CHAT),
    *(replace(case, endpoints=COMPLETIONS) for case in OF_COMPLETIONS),
)


def table() -> str:
    """The list as docs/http.md has it: a line for each field, and what it does."""
    fields: dict[tuple[str, tuple[str, ...]], list[Case]] = {}
    for case in CASES:
        if case.field == UNKNOWN:
            continue
        fields.setdefault((case.field, case.endpoints), []).append(case)
    lines = ["| field | chat | completions | |", "|---|---|---|---|"]
    for (name, endpoints), cases in sorted(fields.items()):
        shown = cases[0].support.value
        columns = [shown if endpoint in endpoints else "" for endpoint in (*CHAT, *COMPLETIONS)]
        words = [case.what if case.support is cases[0].support else f"refused: {case.what}" for case in cases]
        lines.append(f"| `{name}` | {' | '.join(columns)} | {'; '.join(filter(None, words))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
