"""Converts text to token ids and back with the served model's own tokenizer, in threads.

A caller's text always becomes ordinary tokens: special ones come only from the chat template, and from the tokens that
the tokenizer adds around a prompt. Independent of requests and streams.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import tokenizers

from penstock.kv.block_hash import hash_blocks, hash_more_blocks
from penstock.scheduler.request import Context, Prompt
from penstock.service.auth.identity import DEFAULT_TENANT, Principal, current_principal
from penstock.service.chat_templates.chat_message import TemplateInput
from penstock.service.chat_templates.chat_template import ChatTemplate
from penstock.service.chat_templates.renderers import DEFAULT_TIMEOUT_S
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.text.longest_token import longest_token_bytes
from penstock.service.text.prompt_limit import PromptLimit, TextLimit
from penstock.service.text.reasoning import REASONING_MARKS, Reasoning
from penstock.service.text.special_tokens import SpecialTokenGuard
from penstock.service.text.token_table import TokenTextTable, UnsupportedDecoder
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    ConvertedTokenizer,
    read_tokenizer,
)
from penstock.service.text.truncation import Truncation
from penstock.service.thread_pool import FairThreadPool

_LONG_BYTES = 64 << 10
"""Longer texts take so long, up to seconds, that short ones should not wait for them."""
_NUM_RENDERING, _NUM_RENDERING_LONG = 7, 3
"""Number of conversations with slow templates that give way to others at a time, for short and for long prompts."""
_LONG_THREADS = 4
"""Threads for long texts. A tenant uses one at a time, so this many tenants do not wait for each other."""
_HUGE_BYTES = 1 << 20
"""Longer texts have threads of a low priority."""
_HUGE_THREADS = 2
_NOBODY = Principal(DEFAULT_TENANT)
"""The principal outside of a call."""

T = TypeVar("T")


class Tokenizer:
    """A model's tokenizer and chat templates. Immutable, so threads may share it."""

    def __init__(
        self,
        directory: Path,
        chat_template: Path | None = None,
        num_rows: int | None = None,
        template_timeout_s: float = DEFAULT_TIMEOUT_S,
        converted: ConvertedTokenizer | None = None,
    ) -> None:
        """Reads a directory in Hugging Face's layout. ``chat_template``: a file that replaces the model's own template,
        or the name of one of those. ``num_rows``: the model's rows, if there may be fewer than the tokenizer has
        tokens. ``template_timeout_s``: the CPU time for rendering a conversation. ``converted`` takes the place of
        the directory's tokenizer.json. Raises TokenizerError."""
        files = read_tokenizer(directory, chat_template, num_rows, template_timeout_s, converted)
        library = files.library
        library.no_truncation()
        library.no_padding()
        self.directory = directory if converted is None else converted.file.parent
        """The directory with the tokenizer.json."""
        self.facts = facts = files.facts
        self.vocab_size, self.special_tokens, self.eos_token_ids = (
            facts.vocab_size, facts.special_tokens, facts.eos_token_ids
        )  # fmt: skip
        _mark_special(library, self.special_tokens)
        special_tokens = {
            token_id: token for token_id, token in library.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(token_id for token_id in special_tokens if token_id < self.vocab_size)
        """Ids that add nothing to a text unless special tokens are requested."""
        self.spells_with_foreign = any(
            token_id not in special_tokens for token_id in range(facts.vocab_size, facts.num_ids)
        )
        """Whether a text may have tokens that the model lacks."""
        try:
            self.pieces = TokenTextTable(library, self.vocab_size, self.special_ids, files.decoder)
        except UnsupportedDecoder as error:
            raise TokenizerError(f"{files.origin}: decoder {error} is not supported: use another model") from error
        self.longest_token_bytes = longest_token_bytes(library, files.vocabulary.keys(), special_tokens)
        """The most bytes of a caller's text that one token represents, if known."""
        try:
            self._special_token_guard = SpecialTokenGuard(library, special_tokens)
        except (RecursionError, OverflowError) as error:
            raise TokenizerError(
                f"{files.origin}: too many special tokens begin with one another: use another model"
            ) from error
        self._longest_rendered = None
        """The most characters of a rendered template that one token represents, if known."""
        if self.longest_token_bytes is not None and not self._special_token_guard.takes_spaces:
            self._longest_rendered = max(self.longest_token_bytes, self._special_token_guard.longest_name)
        self._library = library
        self._templates = files.templates
        self.reasoning = Reasoning(
            [template.source for template in files.templates.values()],
            {
                mark: files.vocabulary[mark]
                for mark in REASONING_MARKS
                if files.vocabulary.get(mark, facts.vocab_size) < facts.vocab_size
            },
            facts.special_tokens,
            facts.eos_token_ids,
        )

    @cached_property
    def added_ids(self) -> Mapping[str, int]:
        """The ids of the special tokens, and of others that were added to the vocabulary, by their contents."""
        added = self._library.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token_id < self.vocab_size}

    @cached_property
    def marker_ids(self) -> Mapping[str, int]:
        """The ids of added tokens that are not text for the grammar library: special tokens, and others in angle
        brackets."""
        added = self.added_ids.items()
        return {
            content: token_id
            for content, token_id in added
            if token_id in self.special_ids or re.fullmatch("<.*>", content, re.DOTALL)
        }

    @property
    def has_chat_template(self) -> bool:
        return DEFAULT_TEMPLATE in self._templates

    @property
    def template_roles(self) -> AbstractSet[str]:
        """The roles that the default chat template names; none without a template."""
        return self._templates[DEFAULT_TEMPLATE].roles if self.has_chat_template else frozenset()

    def chat_template(self, with_tools: bool) -> ChatTemplate:
        """Returns the template for conversations with or without tools. Raises ServiceError."""
        name = TOOL_TEMPLATE if with_tools and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        if name not in self._templates:
            raise ServiceError(Reason.NO_CHAT_TEMPLATE, field="chat")
        return self._templates[name]

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
        limit: PromptLimit | None = None,
    ) -> list[int]:
        """Returns the ids of a caller's text, which has no special tokens itself. With ``add_special_tokens``, the
        tokenizer adds its own around it, such as the beginning of sequence, and ``truncation`` keeps them. Raises
        ServiceError, also if there are more tokens than ``limit`` allows; before it is truncated, a text may have as
        many as a ``TextLimit`` allows."""
        _check_size((text,), "text")
        if limit is None or truncation is not None:
            limit = TextLimit(field="text" if limit is None else limit.field)
        token_ids = self._special_token_guard.encode(text, add_special_tokens, limit=limit)
        if truncation is None or len(token_ids) <= truncation.max_tokens:
            return token_ids
        if not add_special_tokens or not self._library.num_special_tokens_to_add(False):
            return truncation.cut(token_ids)
        return truncation.cut_inside(token_ids, self._special_token_guard.encode(text, False))

    def encode_pair(
        self, first: str, second: str, truncation: Truncation | None = None, limit: PromptLimit | None = None
    ) -> list[int]:
        """Returns the ids of two texts as the tokenizer joins them, with the special tokens that it adds around and
        between them. ``truncation`` keeps these and cuts the longer text first, as in transformers. Raises
        ServiceError as ``encode`` does."""
        _check_size((first, second), "text" if limit is None else limit.field)
        return self._special_token_guard.encode_pair(first, second, truncation, limit)

    def shortened(self, text: str, num_tokens: int, keeps_first: bool) -> str:
        """Returns a caller's text without its last, or first, ``num_tokens`` tokens; empty if it has no more."""
        return self._special_token_guard.shortened(text, num_tokens, keeps_first)

    def encode_chat(self, chat: TemplateInput, limit: PromptLimit | None = None) -> list[int]:
        """Returns the ids of a conversation, with special tokens only from the template. Raises ServiceError, also if
        there are more tokens than ``limit`` allows, by default a ``TextLimit``."""
        return self._encode_chat(chat, limit or TextLimit(field="chat"), after_answer=False)

    def encode_after(self, text: str, limit: PromptLimit | None = None) -> list[int]:
        """Returns the ids of a caller's text that follows other tokens: tokenized by itself, without special tokens and
        without the space that some tokenizers add at the beginning. Raises ServiceError as ``encode`` does."""
        _check_size((text,), "text")
        return self._special_token_guard.encode(text, False, follows=True, limit=limit)

    def encode_chat_after(self, chat: TemplateInput, limit: PromptLimit | None = None) -> list[int]:
        """Returns the ids of new messages in a conversation that ends with the assistant's answer: the end of that
        turn, and the messages. Raises ServiceError as ``encode_chat`` does."""
        return self._encode_chat(chat, limit, after_answer=True)

    def _encode_chat(self, chat: TemplateInput, limit: PromptLimit | None, after_answer: bool) -> list[int]:
        rendered = self._template_of(chat).render(chat, after_answer)
        if limit is not None and self._longest_rendered is not None:  # it may be too long whatever its tokens are
            limit.check_at_least(-(-len(rendered) // self._longest_rendered))
        return self._special_token_guard.encode_template(rendered, follows=after_answer, limit=limit)

    def render_chat(self, chat: TemplateInput) -> str:
        return str.__str__(self._template_of(chat).render(chat))

    def decode(self, token_ids: Sequence[int], include_special_tokens: bool = False) -> str:
        """Returns the text of ids below ``vocab_size``. Bytes that are not a character become U+FFFD."""
        # A batch of one: see ``SpecialTokenGuard`` on Python's lock.
        text: str
        [text] = self._library.decode_batch([token_ids], skip_special_tokens=not include_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, spelled as in the vocabulary; None if the model has none."""
        token_id: int | None = self._library.token_to_id(token)
        return token_id if token_id is not None and token_id < self.vocab_size else None

    def special_tokens_in(self, text: str) -> dict[int, str]:
        """Returns the special tokens whose text is in ``text``, by their ids."""
        named = ((token_id, self.pieces.all[token_id]) for token_id in self.special_ids)
        return {token_id: content for token_id, content in named if content and content in text}

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of words, without and with a space before, if a tokenizer distinguishes these."""
        spelled = (spelling for word in words for spelling in (word, f" {word}"))
        sequences = (tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spelled)
        # The model has no row for larger ids, so it never writes such a sequence.
        possible = (ids for ids in sequences if ids and max(ids) < self.vocab_size)
        return tuple(dict.fromkeys(possible))

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Refuses a prompt with ids that the model lacks. Raises ServiceError."""
        if not token_ids or max(token_ids) < self.vocab_size:
            return
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= self.vocab_size)
        token_id = token_ids[index]
        token = self._library.id_to_token(token_id) if token_id < self.facts.num_ids else None
        named = "" if token is None else f" ({token!r})"
        raise invalid(
            field,
            f"ids must be below the model's vocabulary size, {self.vocab_size:,}; token {index} of the prompt is "
            f"{token_id:,}{named}: leave it out",
        )

    def _template_of(self, chat: TemplateInput) -> ChatTemplate:
        """Returns the template of a conversation. Raises ServiceError, also if the texts are too long."""
        texts = (text for message in chat.messages for text in (message.role, message.content, message.reasoning))
        _check_size([text for text in texts if text is not None], "chat")
        return self.chat_template(bool(chat.tools))


def _mark_special(library: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Makes the library treat these tokens as special; their other flags stay."""
    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    marked = []
    for content in contents:
        token = added.get(content) or tokenizers.AddedToken(content, special=True)
        if not token.special or content not in added:
            token.special = True
            marked.append(token)
    library.add_special_tokens(marked)


def _check_size(texts: Iterable[str], field: str) -> None:
    try:
        num_bytes = sum(utf8_bytes(text) for text in texts)
    except UnicodeEncodeError:
        raise invalid(field, "is not valid Unicode text: it holds half of a surrogate pair") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise invalid(field, f"at most {MAX_TEXT_BYTES:,} bytes of UTF-8; it has {num_bytes:,}")


class TokenizerPool:
    """Runs slow work off the event loop, in a few threads, and refuses more than it can queue. Tenants take turns, and
    one tenant never has all threads.

    Long texts have threads of their own, so that short ones never wait for them; so have huge ones, which take seconds,
    and must not take the cores from steps and streams. Prompts that are tokenized ahead have one thread for short texts
    and one for long ones, in which tenants take turns too. The threads run in parallel: the library releases the GIL
    while it encodes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        block_size: int,
        max_prompt_tokens: int,
        num_threads: int = 2,
        max_waiting_bytes: int = 64 << 20,
    ) -> None:
        """``num_threads`` may work for one tenant: one on long texts, and the others, at least one, on short ones.
        ``max_waiting_bytes`` limits each of the queues for short, long and huge texts; one tenant may use half of
        it."""
        self.tokenizer = tokenizer
        self.block_size = block_size
        self._context = max_prompt_tokens + 1
        num_short = max(1, num_threads - 1)
        self._short = FairThreadPool(
            "tokenizer",
            num_short + 1,
            max_waiting_bytes,
            threads_per_tenant=num_short,
            num_giving_way=_NUM_RENDERING,
        )
        self._long = FairThreadPool(
            "tokenizer-long", _LONG_THREADS, max_waiting_bytes, num_giving_way=_NUM_RENDERING_LONG
        )
        self._huge = FairThreadPool(
            "tokenizer-huge",
            _HUGE_THREADS,
            max_waiting_bytes,
            num_giving_way=_NUM_RENDERING_LONG,
            is_background=True,
        )
        self._ahead, self._ahead_long = (
            FairThreadPool(name, 1, 2 * max_waiting_bytes, num_giving_way=1, is_background=is_background)
            for name, is_background in (("tokenizer-ahead", False), ("tokenizer-ahead-long", True))
        )

    async def run(
        self, work: Callable[[], T], num_bytes: int, tenant: str | None = None, *, is_ahead: bool = False
    ) -> T:
        """Runs ``work`` in a thread; ``num_bytes`` is the size of its input. ``tenant``: the owner of the work; None is
        the current caller's tenant. ``is_ahead``: no request waits for the work, which must not delay any.

        Raises what ``work`` raises, and ServiceError PREPARATION_FULL. If its caller is cancelled, running work
        continues and waiting work is dropped.
        """
        if is_ahead:
            lane = self._ahead_long if num_bytes > _LONG_BYTES else self._ahead
        else:
            lane = self._huge if num_bytes > _HUGE_BYTES else self._long if num_bytes > _LONG_BYTES else self._short
        return await lane.run(work, num_bytes, current_principal.get(_NOBODY).tenant if tenant is None else tenant)

    def limit(self, field: str, room_for_output: int = 1, num_context_tokens: int = 0) -> PromptLimit:
        """Returns the limit for a prompt in ``field``, by the model's context."""
        return PromptLimit(self._context - room_for_output, field, num_context_tokens)

    def check_text(self, text: str, field: str = "text", room_for_output: int = 1) -> None:
        """Refuses a text that is too long whatever its tokens are. Raises ServiceError."""
        longest = self.tokenizer.longest_token_bytes
        # A character has at least one byte, and its number of characters is already known.
        if longest is not None:
            self.limit(field, room_for_output).check_at_least(-(-len(text) // longest))

    def prompt(self, token_ids: list[int], salt: bytes, limit: PromptLimit, context: Context | None = None) -> Prompt:
        """Checks a prompt's ids and hashes its blocks. The prompt begins with ``context``, which is already checked and
        hashed. Call it in ``run``'s work. Raises ServiceError."""
        limit.check(len(token_ids))
        self.tokenizer.check_ids(token_ids, limit.field)
        if context is None:
            return Prompt(token_ids, hash_blocks(token_ids, self.block_size, salt))
        whole = context.token_ids + token_ids
        return Prompt(whole, hash_more_blocks(whole, context.block_hashes, self.block_size, salt))

    def close(self) -> None:
        """Ends the threads; waiting work is cancelled."""
        for lane in (self._short, self._long, self._huge, self._ahead, self._ahead_long):
            lane.close()
