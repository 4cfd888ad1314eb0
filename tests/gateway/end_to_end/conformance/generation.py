"""Of chats and completions, OpenAI's fields and those that vLLM adds, and what Responses have in common with them."""

import json
from dataclasses import replace
from typing import Any

from .case import (
    ALWAYS,
    CHAT,
    COMPLETIONS,
    END,
    EVERYWHERE,
    GENERATION,
    OTHER_WORD,
    QUESTION,
    RESPONSES,
    UNKNOWN,
    WORD,
    Case,
    Support,
)
from .claims import (
    begins_with_the_message,
    begins_with_the_prompt,
    differs_without,
    goes_on,
    has_a_call,
    has_a_shorter_prompt,
    has_equal_choices,
    has_five_tokens,
    has_logprobs,
    has_logprobs_of,
    has_logprobs_of_each_choice,
    has_no_logprobs,
    has_no_reasoning,
    has_prompt_logprobs,
    has_reasoning,
    has_sixteen_tokens,
    has_three_choices,
    has_token_ids,
    has_two_calls,
    has_two_prompts,
    has_two_words_alone,
    is_cut_to_the_context,
    is_equal_without,
    is_greedy,
    is_said,
    is_the_word,
    keeps_tokens,
    lacks_the_word,
    leaves_it_in_the_text,
    limits_the_output,
    makes_nothing,
    names_tokens_by_id,
    reads_as_one_string,
    reads_as_system,
    reads_as_the_text,
    repeats_with_its_seed,
    scores_the_prompt,
    shows_no_end,
    shows_the_end,
    stops_at,
    tells_the_end_token,
)

IGNORED, REFUSED = Support.IGNORED, Support.REFUSED


def says(text: str) -> dict[str, Any]:
    """A request for the model that says what it is told to."""
    return {"messages": [{"role": "user", "content": f"SAY {text}"}], "max_tokens": None, "tools": TOOLS}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
REASONED = "<think>Well.</think>Yes."
TOOL_NAMES = ("weather", "time")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in TOOL_NAMES]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}}
ROLES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
OPEN = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The kernel is"}]
CONTINUED = {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": False}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is a"}, {"type": "text", "text": "kernel?"}]}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
NO_OPTIONS = {"stream_options": None}
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"const": "first"}}}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "firs[t]"}, "end": "</a>"},
}

OF_ALL = (
    Case("priority", "lower runs first, under --scheduling-policy priority", {"priority": -5}),
    Case("request_id", "for the service's logs", {"request_id": "mine-1"}, support=IGNORED),
    Case("model", "the served model's name, or none", {"model": "demo"}),
    Case("model", "another (404)", {"model": "nobody"}, support=REFUSED, status=404),
    Case(UNKNOWN, "what nobody knows", {UNKNOWN: 1}, support=REFUSED),
)  # fmt: skip

SAMPLING = (
    Case("temperature", "0 takes the likeliest token", {"temperature": 0}, is_greedy),
    Case("temperature", "what is out of bounds", {"temperature": -1}, support=REFUSED),
    Case("top_p", "a small sum, or 0, leaves the likeliest token", {"top_p": 1e-6}, is_greedy),
    Case("top_p", "", {"top_p": 0}, is_greedy),
    Case("top_k", "1 leaves the likeliest token", {"top_k": 1}, is_greedy),
    Case("top_k", "-1 is all", {"top_k": -1}, repeats_with_its_seed),
    Case("min_p", "1 leaves the likeliest token", {"min_p": 1}, is_greedy),
    Case("seed", "makes it repeatable", {}, repeats_with_its_seed),
    Case("seed", "negative ones too", {"seed": -7}, repeats_with_its_seed),
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
    Case("max_draft_tokens", "changes when tokens come, never which", {"max_draft_tokens": 4}, repeats_with_its_seed),
    Case("min_tokens", "no earlier end", {"min_tokens": 4, "logit_bias": {str(END): 100}}, has_five_tokens),
    Case("ignore_eos", "goes on past the end", {"ignore_eos": True, "logit_bias": {str(END): 100}}, goes_on),
    Case("ignore_eos", "without it the end ends", {"logit_bias": {str(END): 100}}, stops_at(None, 1)),
    Case("skip_special_tokens", "false shows them",
         {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {str(END): 100}}, shows_the_end),
    Case("skip_special_tokens", "they are left out",
         {"skip_special_tokens": True, "ignore_eos": True, "logit_bias": {str(END): 100}}, shows_no_end),
    Case("structured_outputs",
         "regex, choice, grammar (Lark or GBNF), json, json_object or structural_tag: what the text matches",
         {"structured_outputs": {"regex": "ver[y] first"}}, is_said("very first")),
    Case("structured_outputs", "", {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
         is_said("<a>first</a>")),
    Case("structured_outputs", "two of them", {"structured_outputs": {"regex": "a", "json_object": True}},
         support=REFUSED),
    *(
        Case(name, "an older name", {name: value}, is_said(text))
        for name, value, text in (
            ("guided_choice", ["very first"], "very first"),
            ("guided_grammar", 'root ::= "very" " first"', "very first"),
            ("guided_json", {"const": "first"}, '"first"'),
            ("guided_regex", "ver[y] first", "very first"),
            ("structural_tag", TAG, "<a>first</a>"),
        )
    ),
    Case("constrained_decoding_start", "after_reasoning: structured_outputs and the like hold for the answer",
         {"constrained_decoding_start": "after_reasoning", "guided_choice": ["first"]}, is_said("first")),
    Case("constrained_decoding_start", "first_token: there is no reasoning",
         {"constrained_decoding_start": "first_token", "guided_choice": ["first"]}, is_said("first")),
    Case("constrained_decoding_start", "others", {"constrained_decoding_start": "later"}, support=REFUSED),
    *(
        Case(name, "", {name: value}, support=REFUSED)
        for name, value in {
            "cache_salt": "x", "guided_decoding_backend": "a", "guided_whitespace_pattern": "a",
            "kv_transfer_params": {"a": 1},
            "length_penalty": 2.0, "logits_processors": ["a"], "repetition_detection": {"a": 1},
            "spaces_between_special_tokens": False, "use_beam_search": True,
            "vllm_xargs": {"a": 1},
        }.items()
    ),
)  # fmt: skip

OF_BOTH = (
    Case("max_tokens", "the most tokens of a choice", {"max_tokens": 5}, limits_the_output),
    Case("max_tokens", "more than the context leaves is cut", {"max_tokens": 10**6, "logit_bias": {str(END): 100}},
         is_cut_to_the_context),
    Case("n", "this many choices", {"n": 3}, has_three_choices),
    Case("n", "0", {"n": 0}, support=REFUSED),
    Case("prompt_logprobs", "of the prompt's tokens", {"prompt_logprobs": 1}, has_prompt_logprobs, streams=False),
    Case("prompt_logprobs", "with stream", {"prompt_logprobs": 1, "stream": True}, support=REFUSED),
    Case("return_token_ids", "of prompt and output", {"return_token_ids": True, "logit_bias": ALWAYS}, has_token_ids),
    Case("return_token_ids", "the end token too", {"return_token_ids": True, "logit_bias": {str(END): 100}},
         tells_the_end_token),
    Case("truncate_prompt_tokens", "the prompt's last tokens",
         {"truncate_prompt_tokens": 2, "return_token_ids": True}, keeps_tokens(-2, 0)),
    Case("truncate_prompt_tokens", "-1: as many as fit", {"truncate_prompt_tokens": -1, "return_token_ids": True},
         keeps_tokens(0, 0)),
    Case("truncate_prompt_tokens", "0", {"truncate_prompt_tokens": 0}, support=REFUSED),
    Case("truncation_side", "right keeps the first tokens",
         {"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True}, keeps_tokens(0, 2)),
    Case("truncation_side", "others", {"truncate_prompt_tokens": 2, "truncation_side": "middle"}, support=REFUSED),
    Case("stream_options", "include_usage: a last chunk with the usage", {}),
    Case("stream_options", "include_obfuscation: nothing is padded",
         {"stream_options": {"include_obfuscation": False}}, whole=NO_OPTIONS),
    Case("stream_options", "other options", {"stream_options": {"usage": True}, "stream": True}, support=REFUSED),
    Case("stream_options", "without stream", {"stream_options": {"include_usage": True}, "stream": False},
         support=REFUSED),
    Case("stream_options", "continuous_usage_stats, with include_usage: usage so far, with each chunk",
         {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, whole=NO_OPTIONS),
    Case("response_format", "text", {"response_format": {"type": "text"}}),
    Case("response_format", "json_object", {"response_format": {"type": "json_object"}}),
    Case("response_format", "json_object with a schema",
         {"response_format": {"type": "json_object", "schema": {"const": "first"}}}, is_said('"first"')),
    Case("response_format", "json_schema", {"response_format": SCHEMA}, is_said('"first"')),
    Case("response_format", "structural_tag", {"response_format": TAG}, is_said("<a>first</a>")),
    Case("response_format", "other types", {"response_format": {"type": "xml"}}, support=REFUSED),
    Case("resume_from", "the rest of a stream that broke off, with stream", {}),
    Case("resume_from", "a damaged ticket", {"resume_from": {"ticket": "AAAA", "choices": [{}]}, "stream": True},
         support=REFUSED),
    Case("resume_from", "without stream", {"resume_from": {"ticket": "AAAA", "choices": [{}]}, "stream": False},
         support=REFUSED),
    Case("user", "", {"user": "me"}, support=IGNORED),
)  # fmt: skip

OF_CHAT = (
    Case("messages", "text", {}, repeats_with_its_seed),
    Case("messages", "parts of a content are lines", {"messages": PARTS}, reads_as_one_string),
    Case("messages", "developer is system", {"messages": ROLES}, reads_as_system("messages")),
    Case("messages", "images, sound", {"messages": IMAGE}, support=REFUSED),
    Case("messages", "an empty list", {"messages": []}, support=REFUSED),
    Case("max_completion_tokens", "the newer name of max_tokens",
         {"max_tokens": None, "max_completion_tokens": 5}, limits_the_output),
    Case("logprobs", "of each token", {"logprobs": True}, has_logprobs(0)),
    Case("logprobs", "those of reasoning and calls too, as in vLLM",
         {**says(REASONED + OTHER_CALL), "logprobs": True}, has_logprobs_of(REASONED + OTHER_CALL, ends=True),
         service="scripted"),
    Case("logprobs", "and where reasoning is left out",
         {**says(REASONED), "logprobs": True, "include_reasoning": False}, has_logprobs_of(REASONED, ends=True),
         service="scripted"),
    Case("logprobs", "of each choice", {"logprobs": True, "n": 3}, has_logprobs_of_each_choice),
    Case("logprobs", "those of a stop string too", {"logprobs": True, "stop": "st f", "logit_bias": ALWAYS},
         has_logprobs_of(" first first")),
    Case("logprobs", "false", {"logprobs": False}, has_no_logprobs),
    Case("top_logprobs", "and alternatives", {"logprobs": True, "top_logprobs": 3}, has_logprobs(3)),
    Case("top_logprobs", "more than 20", {"logprobs": True, "top_logprobs": 21}, support=REFUSED),
    Case("return_tokens_as_token_ids", "names tokens by their ids",
         {"logprobs": True, "return_tokens_as_token_ids": True, "logit_bias": ALWAYS}, names_tokens_by_id),
    Case("tools", "a call, where the chat template shows tools", says(CALL), has_a_call, service="scripted"),
    Case("tools", "several calls", says(CALL + OTHER_CALL), has_two_calls, service="scripted"),
    Case("tools", "other kinds", {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, support=REFUSED),
    Case("tool_choice", "auto", {**says(CALL), "tool_choice": "auto"}, has_a_call, service="scripted"),
    Case("tool_choice", "none: text stays text", {**says(CALL), "tool_choice": "none"}, leaves_it_in_the_text,
         service="scripted"),
    Case("tool_choice", "required", {**says(CALL), "tool_choice": "required"}, has_a_call, service="scripted"),
    Case("tool_choice", "a named function",
         {**says(CALL), "tool_choice": {"type": "function", "function": {"name": "time"}}}, has_a_call,
         service="scripted"),
    Case("tool_choice", "allowed_tools", {**says(CALL), "tool_choice": ALLOWED}, has_a_call, service="scripted"),
    Case("tool_choice", "a function that is not there",
         {**says(CALL), "tool_choice": {"type": "function", "function": {"name": "space"}}}, support=REFUSED,
         service="scripted"),
    Case("parallel_tool_calls", "false keeps only the first call",
         {**says(CALL + OTHER_CALL), "parallel_tool_calls": False}, has_a_call, service="scripted"),
    Case("include_reasoning", "reasoning has a field of its own", says(REASONED), has_reasoning, service="scripted"),
    Case("include_reasoning", "false leaves it out", {**says(REASONED), "include_reasoning": False}, has_no_reasoning,
         service="scripted"),
    Case("continue_final_message", "the output goes on with it", CONTINUED, has_a_shorter_prompt),
    Case("echo", "puts that message before the output", {**CONTINUED, "echo": True}, begins_with_the_message),
    Case("add_generation_prompt", "false opens no turn", {"add_generation_prompt": False}, has_a_shorter_prompt),
    Case("add_special_tokens", "false: the template has them", {"add_special_tokens": False}),
    Case("add_special_tokens", "true", {"add_special_tokens": True}, support=REFUSED),
    Case("thinking_token_budget", "the maximum number of reasoning tokens, after which the answer begins",
         {**says(REASONED), "thinking_token_budget": 50}, has_reasoning, service="scripted"),
    Case("thinking_token_budget", "-1: no limit", {"thinking_token_budget": -1}),
    Case("thinking_token_budget", "an unknown reasoning format", {"thinking_token_budget": 5}, support=REFUSED),
    Case("reasoning_effort", "a variable of the template", {"reasoning_effort": "low"}),
    Case("documents", "a variable of the template", {"documents": [{"text": "a"}]}),
    Case("verbosity", "a variable of the template", {"verbosity": "low"}),
    Case("prediction", "affects only the speed", {"prediction": {"type": "content", "content": "The kernel"}},
         is_equal_without("prediction")),
    Case("prediction", "other content than text", {"prediction": {"type": "content", "content": [{"type": "file"}]}},
         support=REFUSED),
    Case("verbosity", "others", {"verbosity": "none"}, support=REFUSED),
    *(
        Case(name, "", {name: value}, support=IGNORED)
        for name, value in {
            "metadata": {"a": "b"}, "store": True,
        }.items()
    ),
    *(
        Case(name, "", {name: value}, support=REFUSED)
        for name, value in {
            "audio": {"voice": "alloy", "format": "wav"}, "chat_template": "{{ messages }}", "function_call": "auto",
            "functions": [{"name": "f"}], "mm_processor_kwargs": {"a": 1}, "modalities": ["audio"],
            "web_search_options": {},
        }.items()
    ),
)  # fmt: skip

OF_COMPLETIONS = (
    Case("prompt", "text", {}, repeats_with_its_seed),
    Case("prompt", "token ids", {"prompt": [531, 924, 296]}, reads_as_the_text),
    Case("prompt", "several texts", {"prompt": ["The kernel is", "A shell"]}, has_two_prompts),
    Case("prompt", "several lists of ids", {"prompt": [[531, 924, 296], [531, 924, 296]]}, has_equal_choices),
    Case("prompt", "an empty list", {"prompt": []}, support=REFUSED),
    Case("max_tokens", "16 unless given, or null", {"max_tokens": None}, has_sixteen_tokens),
    Case("logprobs", "of each token, and alternatives", {"logprobs": 3}, has_logprobs(3)),
    Case("logprobs", "of each choice", {"logprobs": 0, "n": 3}, has_logprobs_of_each_choice),
    Case("logprobs", "those of a stop string too", {"logprobs": 0, "stop": "st f", "logit_bias": ALWAYS},
         has_logprobs_of(" first first")),
    Case("logprobs", "more than 20", {"logprobs": 21}, support=REFUSED),
    Case("return_tokens_as_token_ids", "names tokens by their ids",
         {"logprobs": 1, "return_tokens_as_token_ids": True, "logit_bias": ALWAYS}, names_tokens_by_id),
    Case("echo", "puts the prompt before the output", {"echo": True}, begins_with_the_prompt),
    Case("echo", "with logprobs those of the prompt", {"echo": True, "logprobs": 1}, scores_the_prompt),
    Case("echo", "only with max_tokens 0", {"echo": True, "max_tokens": 0}, makes_nothing),
    Case("add_special_tokens", "whether the tokenizer adds its own", {"add_special_tokens": False}),
    Case("best_of", "as many as n", {"best_of": 3, "n": 3}, has_three_choices),
    Case("best_of", "more than n", {"best_of": 3}, support=REFUSED),
    Case("suffix", "", {"suffix": "the end"}, support=REFUSED),
)  # fmt: skip

OF_CHAT_AND_RESPONSES = (
    *(
        Case(name, "", {name: value}, support=IGNORED)
        for name, value in {
            "prompt_cache_key": "a", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
            "safety_identifier": "a", "service_tier": "auto",
        }.items()
    ),
    Case("moderation", "", {"moderation": {"model": "a"}}, support=REFUSED),
    Case("chat_template_kwargs", "variables of the template", {"chat_template_kwargs": {"enable_thinking": False}}),
)  # fmt: skip

CASES = (
    *(replace(case, endpoints=EVERYWHERE) for case in OF_ALL),
    *(replace(case, endpoints=GENERATION) for case in SAMPLING),
    *(replace(case, endpoints=CHAT + COMPLETIONS) for case in OF_BOTH),
    *(replace(case, endpoints=CHAT + RESPONSES) for case in OF_CHAT_AND_RESPONSES),
    *(replace(case, endpoints=CHAT) for case in OF_CHAT),
    *(replace(case, endpoints=COMPLETIONS) for case in OF_COMPLETIONS),
)
