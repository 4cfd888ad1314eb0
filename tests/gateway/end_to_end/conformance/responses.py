"""Of Responses, what they have of their own."""

from dataclasses import replace
from typing import Any

from .case import RESPONSES, Case, Support
from .claims import (
    comes_back,
    has_a_call,
    has_a_longer_prompt,
    has_logprobs,
    has_logprobs_of,
    has_no_logprobs,
    has_reasoning,
    has_two_calls,
    is_continued,
    is_said,
    is_stored,
    leaves_it_in_the_text,
    limits_the_output,
    reads_as_system,
    repeats_with_its_seed,
)
from .generation import CALL, OTHER_CALL, REASONED, ROLES, TOOL_NAMES

IGNORED, REFUSED = Support.IGNORED, Support.REFUSED
FUNCTIONS = [{"type": "function", "name": name, "parameters": {}} for name in TOOL_NAMES]
NAMESPACE = {"type": "namespace", "name": "it", "description": "", "tools": FUNCTIONS}
SPACED_CALL = CALL.replace("weather", "it__weather")
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
INCLUDE = {"include": ["message.output_text.logprobs"]}
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
SCHEMA = {"format": {"type": "json_schema", "name": "word", "schema": {"const": "first"}}}


def says(text: str) -> dict[str, Any]:
    """A request for the model that says what it is told to."""
    return {"input": f"SAY {text}", "max_tokens": None, "tools": FUNCTIONS}


OWN = (
    Case("input", "text", {}, repeats_with_its_seed),
    Case("input", "items; developer is system", {"input": ROLES}, reads_as_system("input")),
    Case("input", "images, files", {"input": IMAGE}, support=REFUSED),
    Case("input", "an empty list", {"input": []}, support=REFUSED),
    Case("instructions", "come first, as the system's", {"instructions": "Be brief."},
         has_a_longer_prompt("instructions")),
    Case("max_output_tokens", "the most tokens", {"max_tokens": None, "max_output_tokens": 5}, limits_the_output),
    Case("max_output_tokens", "0", {"max_tokens": None, "max_output_tokens": 0}, support=REFUSED),
    Case("max_tool_calls", "", {"max_tool_calls": 1}, support=IGNORED),
    Case("include", "message.output_text.logprobs: of each token of a message", INCLUDE, has_logprobs(0)),
    Case("include", "of none of reasoning or calls", {**says(f"{REASONED}{OTHER_CALL}No."), **INCLUDE},
         has_logprobs_of("Yes.No."), service="scripted"),
    Case("include", "to the token that a stop string cuts", {**says("Yes and no."), **INCLUDE, "stop": " no"},
         has_logprobs_of("Yes and"), service="scripted"),
    Case("include", "reasoning.encrypted_content: it is never encrypted",
         {**says(REASONED), "include": ["reasoning.encrypted_content"]}, has_reasoning, service="scripted"),
    Case("include", "what hosted tools would give", {"include": ["web_search_call.results"]}),
    Case("include", "others", {"include": ["everything"]}, support=REFUSED),
    Case("top_logprobs", "and alternatives", {**INCLUDE, "top_logprobs": 3}, has_logprobs(3)),
    Case("top_logprobs", "without include too", {"top_logprobs": 3}, has_logprobs(3)),
    Case("top_logprobs", "more than 20", {"top_logprobs": 21}, support=REFUSED),
    Case("metadata", "comes back", {"metadata": {"a": "b"}}, comes_back("metadata", {"a": "b"})),
    Case("user", "comes back", {"user": "me"}, comes_back("user", "me")),
    Case("parallel_tool_calls", "false keeps only the first call",
         {**says(CALL + OTHER_CALL), "parallel_tool_calls": False}, has_a_call, service="scripted"),
    Case("reasoning", "effort: a variable of the template", {"reasoning": {"effort": "low"}},
         comes_back("reasoning", {"effort": "low"})),
    Case("reasoning", "summary: auto, concise or detailed: reasoning comes as it was written",
         {**says(REASONED), "reasoning": {"summary": "concise", "generate_summary": "detailed"}}, has_reasoning,
         service="scripted"),
    Case("reasoning", "context: the template decides", {"reasoning": {"context": "all_turns"}}),
    Case("reasoning", "mode: pro", {"reasoning": {"mode": "pro"}}, support=REFUSED),
    Case("stream_options", "include_obfuscation: nothing is padded",
         {"stream_options": {"include_obfuscation": False}}),
    Case("stream_options", "other options", {"stream_options": {"include_usage": True}}, support=REFUSED),
    Case("text", "format: text", {"text": {"format": {"type": "text"}}}, has_no_logprobs),
    Case("text", "format: json_schema", {"text": SCHEMA}, is_said('"first"')),
    Case("text", "format: json_object", {"text": {"format": {"type": "json_object"}}}),
    Case("text", "format: json_object with a schema",
         {"text": {"format": {"type": "json_object", "schema": {"const": "first"}}}}, is_said('"first"')),
    Case("text", "format: others", {"text": {"format": {"type": "xml"}}}, support=REFUSED),
    Case("text", "verbosity: a variable of the template", {"text": {"verbosity": "low"}},
         comes_back("text", {"format": {"type": "text"}, "verbosity": "low"})),
    Case("text", "verbosity: others", {"text": {"verbosity": "none"}}, support=REFUSED),
    Case("tools", "a call, where the chat template shows tools", says(CALL), has_a_call, service="scripted"),
    Case("tools", "several calls", says(CALL + OTHER_CALL), has_two_calls, service="scripted"),
    Case("tools", "of a namespace", {**says(SPACED_CALL), "tools": [NAMESPACE]}, has_a_call, service="scripted"),
    Case("tools", "hosted ones are not offered", {"tools": [{"type": "web_search"}]}),
    Case("tools", "other kinds", {"tools": [{"type": "hammer"}]}, support=REFUSED),
    Case("tool_choice", "auto", {**says(CALL), "tool_choice": "auto"}, has_a_call, service="scripted"),
    Case("tool_choice", "none: text stays text", {**says(CALL), "tool_choice": "none"}, leaves_it_in_the_text,
         service="scripted"),
    Case("tool_choice", "required", {**says(CALL), "tool_choice": "required"}, has_a_call, service="scripted"),
    Case("tool_choice", "a named function", {**says(CALL), "tool_choice": {"type": "function", "name": "time"}},
         has_a_call, service="scripted"),
    Case("tool_choice", "allowed_tools", {**says(CALL), "tool_choice": ALLOWED}, has_a_call, service="scripted"),
    Case("tool_choice", "a hosted tool", {"tool_choice": {"type": "web_search"}}, support=REFUSED),
    Case("background", "false", {"background": False}),
    Case("background", "true: it goes on when its client disconnects", {"background": True},
         whole={"background": None}),
    Case("background", "true with store: false", {"background": True, "store": False}, support=REFUSED),
    Case("store", "false", {"store": False}, is_stored(False)),
    Case("store", "true", {"store": True}, is_stored(True)),
    Case("previous_response_id", "the stored response whose conversation goes on", {}, is_continued),
    Case("previous_response_id", "an unknown one", {"previous_response_id": "resp_1"}, support=REFUSED, status=404),
    Case("client_metadata", "", {"client_metadata": {"a": "b"}}, support=IGNORED),
    Case("truncation", "disabled", {"truncation": "disabled"}),
    Case("truncation", "auto", {"truncation": "auto"}, support=REFUSED),
    *(
        Case(name, "", {name: value}, support=REFUSED)
        for name, value in {
            "context_management": [{"type": "compaction"}], "conversation": "conv_1",
            "prompt": {"id": "pmpt_1"},
        }.items()
    ),
)  # fmt: skip

CASES = tuple(replace(case, endpoints=RESPONSES) for case in OWN)
