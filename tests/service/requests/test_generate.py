"""From a start to a request: defaults, cost, and what goes together and what doesn't."""

import grpc
import pytest

import penstock.v1 as pb
from penstock.kv import block_hash
from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import Context
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.contexts import ContextStore
from penstock.service.requests.cost import MAX_LOGPROB_ENTRIES, MAX_TOKENS_IN_ALL, MAX_WHOLE_ANSWER
from penstock.service.requests.generate import ResponseMode
from penstock.service.text.detokenizer import IdsOnly
from penstock.service.text.tokenizer import Tokenizer

EOS = 256


def start(text="hello", output=None, **sampling):
    return pb.GenerationStart(text=text, sampling=pb.SamplingParams(**sampling), output=output)


async def refusal(awaitable):
    with pytest.raises(ServiceError) as error:
        await awaitable
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return error.value


async def test_defaults(convert):
    request = await convert(pb.GenerationStart(text="hello"))
    seed = request.sampling.seed
    assert request.sampling == SamplingParams(seed=seed, stop_token_ids=(EOS,))
    assert request.prompt_token_ids == list(b"hello")
    assert (request.n, request.priority, request.deadline) == (1, 0, None)
    assert request.max_tokens == 4096 - 5


async def test_every_field_arrives(convert):
    sampling = pb.SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=1, seed=2**63 - 1, max_tokens=30, min_tokens=3, stop=["x"], stop_token_ids=[9, 3],
        logit_bias={5: 1.5, 4: -100}, allowed_token_ids=[8, 7, 8], bad_words=["ab"], n=4,
    )  # fmt: skip
    request = await convert(
        pb.GenerationStart(
            text="hi", sampling=sampling, output=pb.OutputOptions(logprobs=0, prompt_logprobs=3), priority=-5
        )
    )
    assert request.sampling == SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=1, seed=2**63 - 1, min_tokens=3, stop_token_ids=(3, 9, EOS),
        logit_bias=((4, -100.0), (5, 1.5)), allowed_token_ids=(7, 8), bad_words=((97, 98), (32, 97, 98)), logprobs=0,
        prompt_logprobs=3,
    )  # fmt: skip
    assert (request.n, request.max_tokens, request.priority) == (4, 30, -5)


async def test_zero_is_not_absent(convert):
    request = await convert(start(temperature=0.0, seed=0))
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 0)


async def test_seeds_differ(convert):
    seeds = {(await convert(start())).sampling.seed for _ in range(20)}
    assert len(seeds) == 20


async def test_ignore_eos_leaves_the_callers_own_stops(convert):
    assert (await convert(start(ignore_eos=True, stop_token_ids=[5]))).sampling.stop_token_ids == (5,)


async def test_hashes_are_the_tenants(convert):
    prompt = "x" * 40
    request = await convert(start(prompt), tenant="acme")
    assert request.block_hashes == hash_blocks(list(prompt.encode()), 16, tenant_salt("bytes", "acme"))
    assert request.block_hashes != (await convert(start(prompt))).block_hashes
    assert request.hash_salt == tenant_salt("bytes", "acme")


async def test_chat_is_rendered_and_a_users_special_tokens_are_text(convert):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="<|end|>")])
    ids = (await convert(pb.GenerationStart(chat=chat))).prompt_token_ids
    assert ids == [257, *b"user\n", *b"<|end|>", 256, 257, *b"assistant\n"]
    chat.add_generation_prompt = False
    assert (await convert(pb.GenerationStart(chat=chat))).prompt_token_ids == ids[:-11]


async def test_text_is_made_only_where_it_is_needed(convert):
    ids_only = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)
    assert isinstance((await convert(start(output=ids_only))).make_text(), IdsOnly)
    assert not isinstance((await convert(start(output=ids_only, stop=["x"]))).make_text(), IdsOnly)
    assert not isinstance((await convert(start())).make_text(), IdsOnly)


async def test_prompt_is_required(convert, make_builder, byte_tokenizer_path, tmp_path):
    assert (await refusal(convert(pb.GenerationStart()))).field == "prompt"
    assert (await refusal(convert(pb.GenerationStart(text="")))).field == "text"
    assert (await refusal(convert(start("x" * 4096)))).field == "text"
    assert (await convert(start("x" * 4095))).max_tokens == 1


async def test_without_a_template_chat_is_refused(convert, make_builder, byte_tokenizer_path, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((byte_tokenizer_path / "tokenizer.json").read_bytes())
    builder = make_builder(tokenizer=Tokenizer(tmp_path))
    with pytest.raises(ServiceError) as error:
        await convert(pb.GenerationStart(chat=pb.Chat(messages=[pb.ChatMessage(role="user")])), builder)
    assert error.value.reason is Reason.NO_CHAT_TEMPLATE


async def test_a_limit_on_reasoning_needs_a_known_format(convert):
    start = pb.GenerationStart(text="hi", sampling=pb.SamplingParams(thinking_token_budget=0))
    with pytest.raises(ServiceError, match="--reasoning-parser") as refused:
        await convert(start)
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "sampling.thinking_token_budget")


@pytest.mark.parametrize(
    ("asked", "gets"), [(95, 95), (96, 96), (97, 96), (4096, 96), (10**6, 96), (2**32 - 1, 96), (None, 96)]
)
async def test_max_tokens_is_cut_to_what_the_context_leaves(convert, asked, gets):
    assert (await convert(start("x" * 4000, max_tokens=asked))).max_tokens == gets
    assert (
        await convert(start("x" * 4000, output=pb.OutputOptions(logprobs=20), max_tokens=asked, n=8))
    ).max_tokens == gets


async def test_input_too_long_for_the_context_is_refused_as_such(convert):
    ids = pb.TokenIds(ids=[1] * 4096)
    for long in (start("x" * 4096), pb.GenerationStart(token_ids=ids)):
        assert (await refusal(convert(long))).reason is Reason.CONTEXT_LENGTH
    assert (await refusal(convert(start("")))).reason is Reason.INVALID_FIELD


async def test_a_limit_on_the_output_fits_the_cache(convert, make_builder):
    builder = make_builder(max_sequence_tokens=1024)
    for asked in (None, 500):
        assert (await convert(start("x" * 1000, max_tokens=asked), builder)).max_tokens == 24


async def test_min_tokens_is_at_most_max_tokens(convert):
    assert (await refusal(convert(start(max_tokens=3, min_tokens=4)))).field == "sampling.min_tokens"
    assert (await refusal(convert(start("x" * 4000, min_tokens=97)))).field == "sampling.min_tokens"
    assert (await convert(start(max_tokens=4, min_tokens=4))).sampling.min_tokens == 4


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (start("x", n=64, max_tokens=MAX_TOKENS_IN_ALL // 64), "sampling.n"),
        (start("x" * 100_000, n=64, max_tokens=1), "sampling.n"),
        (start(n=64), "sampling.n"),
        (
            start(output=pb.OutputOptions(logprobs=20), n=4, max_tokens=MAX_LOGPROB_ENTRIES // 84 + 1),
            "output.logprobs",
        ),
        (start("x" * 250_000, output=pb.OutputOptions(prompt_logprobs=20)), "output.prompt_logprobs"),
    ],
)
async def test_cost_is_bounded_as_a_whole(convert, make_builder, request_, field):
    error = await refusal(convert(request_, make_builder(max_model_len=1 << 20)))
    assert (error.reason, error.field) == (Reason.TOO_EXPENSIVE, field)


async def test_cost_at_its_bound_is_allowed(convert, make_builder):
    builder = make_builder(max_model_len=1 << 20)
    request = await convert(start("x" * 100, n=64, max_tokens=MAX_TOKENS_IN_ALL // 64 - 100), builder)
    assert request.n * (len(request.prompt_token_ids) + request.max_tokens) == MAX_TOKENS_IN_ALL
    # What the demo model's context leaves, and one choice of any length, need no thought.
    assert (await convert(start(n=64), make_builder(max_model_len=16_384))).n == 64
    assert (await convert(start(), make_builder(max_model_len=1 << 21))).max_tokens == (1 << 21) - 5


@pytest.mark.parametrize(
    ("output", "n", "max_tokens", "field"),
    [
        (pb.OutputOptions(logprobs=20), 4, MAX_WHOLE_ANSWER // 88, "output.logprobs"),
        (pb.OutputOptions(logprobs=0), 1, MAX_WHOLE_ANSWER // 2, "output.logprobs"),
        (pb.OutputOptions(prompt_logprobs=15), 1, 1, "output.prompt_logprobs"),
        # A text of at most 7 bytes takes 2 units.
        (pb.OutputOptions(logprobs=20, include_token_texts=True), 4, MAX_WHOLE_ANSWER // 256, "output.logprobs"),
        (pb.OutputOptions(prompt_logprobs=4, include_token_texts=True), 1, 32015, "output.prompt_logprobs"),
    ],
)
async def test_an_answer_in_one_message_may_have_fewer_logprobs(convert, make_builder, output, n, max_tokens, field):
    builder = make_builder(max_model_len=1 << 20)
    prompt = "x" * (MAX_WHOLE_ANSWER // 16 - 1)
    fits = pb.GenerationStart(text=prompt, output=output, sampling=pb.SamplingParams(n=n, max_tokens=max_tokens))
    assert await convert(fits, builder, answer=ResponseMode.WHOLE)
    more = pb.GenerationStart()
    more.CopyFrom(fits)
    if field == "output.logprobs":
        more.sampling.max_tokens += 1
    else:
        more.text += "x"
    error = await refusal(convert(more, builder, answer=ResponseMode.WHOLE))
    assert (error.reason, error.field) == (Reason.TOO_EXPENSIVE, field)
    assert "GenerateOne" in error.message
    assert await convert(more, builder)


async def test_logprobs_of_output_and_prompt_count_together(convert, make_builder):
    half = MAX_WHOLE_ANSWER // 2
    request = start("x" * (half // 2), pb.OutputOptions(logprobs=0, prompt_logprobs=1), max_tokens=half // 2 + 1)
    error = await refusal(convert(request, make_builder(max_model_len=1 << 20), answer=ResponseMode.WHOLE))
    assert error.field == "output.logprobs"
    assert len(error.message) < 300


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
async def test_the_log_probabilities_of_a_token_fit_in_a_message(
    convert, make_builder, byte_tokenizer, monkeypatch, name
):
    request = start("x", pb.OutputOptions(include_token_texts=True), max_tokens=1)
    setattr(request.output, name, 20)
    monkeypatch.setattr(byte_tokenizer.pieces, "longest_bytes", 16_384 // 21 - 11)
    assert await convert(request, make_builder())
    monkeypatch.setattr(byte_tokenizer.pieces, "longest_bytes", 16_384 // 21 - 10)
    error = await refusal(convert(request, make_builder()))
    assert (error.reason, error.field) == (Reason.TOO_EXPENSIVE, f"output.{name}")
    request.output.include_token_texts = False
    assert await convert(request, make_builder())


TEXT, IDS, BOTH = pb.OUTPUT_FORMAT_TEXT, pb.OUTPUT_FORMAT_TOKEN_IDS, pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS


@pytest.mark.parametrize(("format_", "units"), [(TEXT, 1), (IDS, 1), (BOTH, 2)])
async def test_an_answer_in_one_message_has_fewer_tokens(convert, make_builder, format_, units):
    """The longest token here is <|end|>, of 7 bytes; an id takes 3."""
    builder = make_builder(max_model_len=1 << 20)
    most = MAX_WHOLE_ANSWER // (2 * units)
    output = pb.OutputOptions(format=format_)
    assert await convert(start("x", output, n=2, max_tokens=most), builder, answer=ResponseMode.WHOLE)
    more = start("x", output, n=2, max_tokens=most + 1)
    error = await refusal(convert(more, builder, answer=ResponseMode.WHOLE))
    assert (error.reason, error.field) == (Reason.TOO_EXPENSIVE, "sampling.max_tokens")
    assert "call GenerateOne" in error.message
    assert await convert(more, builder)


async def test_a_default_fits_an_answer_in_one_message(convert, make_builder):
    builder = make_builder(max_model_len=1 << 20)
    assert (await convert(start("x"), builder, answer=ResponseMode.WHOLE)).max_tokens == MAX_WHOLE_ANSWER
    request = start("x" * 1000, pb.OutputOptions(logprobs=2, prompt_logprobs=0), n=4)
    assert (await convert(request, builder, answer=ResponseMode.WHOLE)).max_tokens == (MAX_WHOLE_ANSWER - 1000) // 16
    request = start("x", n=4, min_tokens=MAX_WHOLE_ANSWER // 4 + 1)
    assert (await refusal(convert(request, builder, answer=ResponseMode.WHOLE))).reason is Reason.TOO_EXPENSIVE


@pytest.mark.parametrize("longest", [0, 5, 128])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_the_largest_answer_is_one_that_clients_take(num_top, longest):
    """With large ids, 8 bytes of text a token, and with texts of tokens beside log-probabilities."""
    per_entry = 1 + bool(longest) * -(-(longest + 3) // 8)
    num_tokens = MAX_WHOLE_ANSWER // ((num_top + 1) * per_entry + 1)
    tops = num_tokens * num_top
    logprobs = pb.Logprobs(num_top=num_top, chosen=[-1.5] * num_tokens, top=[-2.5] * tops)
    logprobs.top_token_ids.extend([2_000_000] * tops)
    if longest:
        logprobs.chosen_texts.extend([b"x" * longest] * num_tokens)
        logprobs.top_texts.extend([b"x" * longest] * tops)
    choice = pb.Choice(text="x" * 8 * num_tokens, token_ids=[2_000_000] * num_tokens, logprobs=logprobs)
    assert pb.CompleteResponse(choices=[choice]).ByteSize() < (4 << 20) - 1024


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [97, 5], "bad_words": ["a"], "stop_token_ids": [5], "min_tokens": 1},
    ],
)
async def test_masks_that_leave_nothing_are_refused(convert, sampling):
    assert (await refusal(convert(start(**sampling)))).field == "sampling.allowed_token_ids"


@pytest.mark.parametrize("sampling", [{"allowed_token_ids": [97, 98], "bad_words": ["a"]}, {"min_tokens": 1}])
async def test_masks_that_leave_something_are_not(convert, sampling):
    assert await convert(start(**sampling))


class TestContinueFrom:
    """What comes after a context that is kept."""

    @pytest.fixture
    def kept(self):
        """Of the tenant "default": x, 40 times."""
        ids = [ord("x")] * 40
        conversations = ContextStore(600.0, 1_000_000)
        hashes = hash_blocks(ids, 16, tenant_salt("bytes", "default"))
        assert conversations.keep("R", "default", Context(ids, hashes), wanted=True)
        return conversations.find("R", "default")

    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ({"text": "<|end|>"}, [*b"<|end|>"]),
            ({"text": ""}, []),
            ({}, []),
            ({"token_ids": pb.TokenIds(ids=[EOS, 5])}, [EOS, 5]),
            (
                {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="so?")])},
                [EOS, 257, *b"user\nso?", EOS, 257, *b"assistant\n"],
            ),
        ],
    )
    async def test_what_is_new_follows_the_context(self, convert, kept, prompt, expected):
        request = await convert(pb.GenerationStart(continue_from="R", **prompt), context=kept)
        assert request.prompt_token_ids == [ord("x")] * 40 + expected
        assert request.block_hashes == hash_blocks(request.prompt_token_ids, 16, request.hash_salt)
        assert request.max_tokens == 4096 - 40 - len(expected)

    @pytest.mark.parametrize("num_hashes", [0, 1, 2])
    async def test_hashes_that_are_known_are_gone_on_from(self, convert, kept, num_hashes, monkeypatch):
        kept.hashes = kept.hashes[: 32 * num_hashes]
        hashed = []

        def counted(ids, *rest):
            hashed.append(len(ids))
            return hash_blocks(ids, *rest)

        monkeypatch.setattr(block_hash, "hash_blocks", counted)
        request = await convert(pb.GenerationStart(continue_from="R", text="y" * 30), context=kept)
        assert request.block_hashes == hash_blocks(request.prompt_token_ids, 16, request.hash_salt)
        assert hashed == [70 - 16 * num_hashes]

    async def test_all_bounds_are_those_of_the_whole(self, convert, make_builder, kept):
        builder = make_builder(max_model_len=64)
        request = await convert(pb.GenerationStart(continue_from="R", text="y" * 23), builder, context=kept)
        assert (len(request.prompt_token_ids), request.max_tokens) == (63, 1)
        error = await refusal(convert(pb.GenerationStart(continue_from="R", text="y" * 24), builder, context=kept))
        assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH, "text")
        assert "63 tokens together with the context; they are 64, 40 of them the context's" in error.message
        error = await refusal(
            convert(pb.GenerationStart(continue_from="R"), make_builder(max_model_len=40), context=kept)
        )
        assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH, "continue_from")
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="y" * 30)])
        error = await refusal(convert(pb.GenerationStart(continue_from="R", chat=chat), builder, context=kept))
        assert error.field == "chat"
        ids = pb.TokenIds(ids=[258])
        error = await refusal(convert(pb.GenerationStart(continue_from="R", token_ids=ids), builder, context=kept))
        assert error.field == "token_ids.ids[0]"
        short = pb.GenerationStart(continue_from="R", text="y" * 5, sampling=pb.SamplingParams(max_tokens=20))
        assert (await convert(short, builder, context=kept)).max_tokens == 19

    async def test_cost_counts_the_context(self, convert, make_builder, kept):
        builder = make_builder(max_model_len=1 << 20)
        sampling = pb.SamplingParams(n=64, max_tokens=MAX_TOKENS_IN_ALL // 64 - 40)
        assert await convert(pb.GenerationStart(continue_from="R", sampling=sampling), builder, context=kept)
        sampling.max_tokens += 1
        error = await refusal(convert(pb.GenerationStart(continue_from="R", sampling=sampling), builder, context=kept))
        assert error.field == "sampling.n"

    @pytest.mark.parametrize(
        ("fields", "retain_s"),
        [
            ({"text": "x"}, 0),
            ({"continue_from": "R"}, 600),
            ({"text": "x", "retain_ms": 1500}, 1.5),
            ({"continue_from": "R", "retain_ms": 0}, 0),
            ({"text": "x", "retain_ms": 86_400_000}, 600),
        ],
    )
    async def test_how_long_kv_is_retained(self, convert, kept, fields, retain_s):
        request = await convert(pb.GenerationStart(**fields), context=kept if "continue_from" in fields else None)
        assert request.retain_s == retain_s


async def test_a_new_limit_on_the_output_is_held_against_the_same_bounds(convert, make_builder):
    builder = make_builder(max_model_len=1 << 20)
    request = await convert(start("x" * 100, n=64, max_tokens=10, min_tokens=3), builder)
    for most in (3, MAX_TOKENS_IN_ALL // 64 - 100):
        assert builder.cut_max_tokens(request, most) == most
    for max_tokens, problem in (
        (2, "must be at least min_tokens, 3"),
        (MAX_TOKENS_IN_ALL // 64 - 99, "n x .prompt tokens . max_tokens. must be at most"),
    ):
        with pytest.raises(ServiceError, match=problem):
            builder.cut_max_tokens(request, max_tokens)
    request = await convert(start(output=pb.OutputOptions(logprobs=20), max_tokens=10), builder)
    with pytest.raises(ServiceError, match=r"n x max_tokens x \(logprobs"):
        builder.cut_max_tokens(request, MAX_LOGPROB_ENTRIES // 21 + 1)
    request = await convert(start("x" * 100, max_tokens=10), builder)
    assert builder.cut_max_tokens(request, 2**32 - 1) == (1 << 20) - 100


def test_a_text_far_too_long_is_refused_before_it_waits_for_a_thread(make_builder):
    builder = make_builder(max_model_len=100)
    builder.check(start("x" * 99))
    with pytest.raises(ServiceError, match="text: must be 1 to 99 tokens; it has 100 at least"):
        builder.check(start("x" * 100))
