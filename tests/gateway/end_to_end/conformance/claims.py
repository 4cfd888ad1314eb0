"""What must hold of an answer: each takes it, and a way to ask the same with other fields."""

import math

from .case import END, NUM_TOKENS, QUESTION, WORD, Answer, Ask, Holds


def limits_the_output(answer: Answer, ask: Ask) -> None:
    assert (answer.output_tokens, answer.end) == (5, ("length", None))


def is_greedy(answer: Answer, ask: Ask) -> None:
    greedy = ask(temperature=0, top_p=None, top_k=None, min_p=None, seed=None)
    assert answer.text == greedy.text
    assert answer.text == ask(seed=8).text


def repeats_with_its_seed(answer: Answer, ask: Ask) -> None:
    assert ask().text == answer.text
    assert ask(seed=8).text != answer.text


def is_equal_without(name: str) -> Holds:
    def is_equal(answer: Answer, ask: Ask) -> None:
        assert ask(**{name: None}).text == answer.text

    return is_equal


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
        assert (answer.text, answer.output_tokens) == (text, output_tokens)
        assert answer.end == ("stop", reason if answer.tells_stop else None)

    return stops


def is_said(text: str) -> Holds:
    def is_it(answer: Answer, ask: Ask) -> None:
        assert answer.text == text

    return is_it


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


def has_logprobs_of(said: str, *, ends: bool = False) -> Holds:
    """The tokens that it is made of; with ``ends`` also the end token after them."""

    def has(answer: Answer, ask: Ask) -> None:
        (choice,) = answer.choices
        assert "".join(choice.tokens[:-1] if ends else choice.tokens) == said
        assert all(value is not None and value <= 0 for value in choice.logprobs)

    return has


def has_logprobs_of_each_choice(answer: Answer, ask: Ask) -> None:
    for choice in answer.choices:
        assert "".join(choice.tokens) == choice.text
        assert len(choice.logprobs) == NUM_TOKENS


def has_no_logprobs(answer: Answer, ask: Ask) -> None:
    assert answer.choices[0].logprobs == []


def has_token_ids(answer: Answer, ask: Ask) -> None:
    assert answer.choices[0].token_ids == [WORD] * NUM_TOKENS
    assert len(answer.prompt_token_ids) == answer.prompt_tokens


def names_tokens_by_id(answer: Answer, ask: Ask) -> None:
    assert answer.choices[0].tokens == [f"token_id:{WORD}"] * NUM_TOKENS


def tells_the_end_token(answer: Answer, ask: Ask) -> None:
    """As many tokens as the usage counts, the last of which is not in the text."""
    (choice,) = answer.choices
    assert choice.token_ids == [END]
    assert (choice.text, answer.output_tokens) == ("", 1)


def keeps_tokens(first: int, last: int) -> Holds:
    """Of the prompt those from ``first`` to before ``last``; 0 is its end."""

    def keeps(answer: Answer, ask: Ask) -> None:
        whole = ask(truncate_prompt_tokens=None, truncation_side=None).prompt_token_ids
        assert answer.prompt_token_ids == whole[first : last or None]
        assert answer.prompt_tokens == len(answer.prompt_token_ids)

    return keeps


def counts_kept_tokens(answer: Answer, ask: Ask) -> None:
    assert answer.prompt_tokens == 2


def is_cut_to_the_context(answer: Answer, ask: Ask) -> None:
    assert answer.end == ("stop", None)


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


def reads_as_system(name: str) -> Holds:
    """``name``: of the conversation."""

    def reads(answer: Answer, ask: Ask) -> None:
        conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        assert answer == ask(**{name: conversation})

    return reads


def has_a_longer_prompt(than_without: str) -> Holds:
    def has(answer: Answer, ask: Ask) -> None:
        assert answer.prompt_tokens > ask(**{than_without: None}).prompt_tokens

    return has


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


def comes_back(name: str, value: object) -> Holds:
    """As a field of the answer."""

    def comes(answer: Answer, ask: Ask) -> None:
        given = getattr(answer.raw, name)
        assert (given if isinstance(given, str | dict) else given.to_dict()) == value

    return comes


def is_stored(expected: bool) -> Holds:
    """And says so."""

    def is_kept(answer: Answer, ask: Ask) -> None:
        assert answer.raw.store is expected

    return is_kept


def is_continued(answer: Answer, ask: Ask) -> None:
    """The next prompt has it, and what it answered."""
    alone, continued = ask(), ask(previous_response_id=answer.raw.id)
    assert continued.prompt_tokens >= alone.prompt_tokens + answer.prompt_tokens


def is_of_length(length: int) -> Holds:
    """Each vector, of so many values, has length 1."""

    def is_of(answer: Answer, ask: Ask) -> None:
        for vector in answer.vectors:
            assert len(vector) == length
            assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-3)

    return is_of


def has_long_vectors(answer: Answer, ask: Ask) -> None:
    assert math.hypot(*answer.vectors[0]) > 1.1


def is_the_vector_of_its_text(answer: Answer, ask: Ask) -> None:
    for vector, text in zip(answer.vectors, ("The kernel is", "A shell"), strict=False):
        alone = ask(input=text).vectors[0]
        # In plain torch sums depend on what else is in the batch.
        assert all(math.isclose(*values, abs_tol=1e-5) for values in zip(vector, alone, strict=True))


def is_the_same_in_either_form(answer: Answer, ask: Ask) -> None:
    assert answer.vectors == ask(encoding_format="float").vectors == ask(encoding_format="base64").vectors


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
    assert (choice.calls, choice.finish_reason) == ([], "stop")
    assert choice.text.startswith("<tool_call>")


def has_reasoning(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert (choice.reasoning, choice.text) == ("Well.", "Yes.")


def has_no_reasoning(answer: Answer, ask: Ask) -> None:
    (choice,) = answer.choices
    assert (choice.reasoning, choice.text) == ("", "Yes.")
