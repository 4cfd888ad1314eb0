"""Text to token ids and back, by the served model's own tokenizer, and the threads in which that happens.

Whatever a caller writes becomes ordinary tokens: special ones come from the chat template, and from what the tokenizer
puts around a prompt, alone. Knows neither requests nor streams.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers

from penstock.kv.block_hash import hash_blocks
from penstock.scheduler.request import Context, Prompt
from penstock.service.auth.identity import DEFAULT_TENANT, Principal, current_principal
from penstock.service.chat_templates.chat_template import ChatTemplate, TemplateInput, TemplateMessage
from penstock.service.chat_templates.renderers import DEFAULT_TIMEOUT_S
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.text.longest_token import longest_token_bytes
from penstock.service.text.prompt_limit import PromptLimit
from penstock.service.text.reasoning import REASONING_MARKS, Reasoning
from penstock.service.text.special_tokens import SpecialTokenGuard
from penstock.service.text.token_table import TokenTextTable, UnsupportedDecoder
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TokenizerFiles, read_tokenizer
from penstock.service.text.truncation import Truncation
from penstock.service.thread_pool import FairThreadPool

__all__ = ["Prompt", "TemplateInput", "TemplateMessage", "Tokenizer", "TokenizerError", "TokenizerPool"]

_LONG_BYTES = 64 << 10
"""What has more takes so long, up to seconds, that nothing short should wait for it."""
_NUM_RENDERING, _NUM_RENDERING_LONG = 7, 3
"""Conversations whose templates take long: this many at a time let others pass them, with short prompts and with long
ones."""
_LONG_THREADS = 4
"""Threads for long texts. A tenant uses one of them at a time, so this many tenants do not wait for each other."""
_NOBODY = Principal(DEFAULT_TENANT)
"""Outside of a call."""

T = TypeVar("T")


class Tokenizer:
    """A model's tokenizer and chat template. Nothing changes after it is made, so threads may share it."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises TokenizerError."""
        library = files.library
        library.no_truncation()
        library.no_padding()
        self.directory = files.path.parent
        self.facts = facts = files.facts
        self.vocab_size, self.special_tokens, self.eos_token_ids = (
            facts.vocab_size, facts.special_tokens, facts.eos_token_ids
        )  # fmt: skip
        _mark_special(library, self.special_tokens)
        special_tokens = {
            token_id: token for token_id, token in library.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(token_id for token_id in special_tokens if token_id < self.vocab_size)
        """Ids that leave no trace in a text, unless special tokens are asked for."""
        self.spells_with_foreign = any(
            token_id not in special_tokens for token_id in range(facts.vocab_size, facts.num_ids)
        )
        """Whether it may make tokens of a text that the model does not have."""
        try:
            self.pieces = TokenTextTable(library, self.vocab_size, self.special_ids, files.decoder)
            """What each token adds to a text."""
        except UnsupportedDecoder as error:
            raise TokenizerError(f"{files.path}: decoder {error} is not supported: use another model") from error
        self.longest_token_bytes = longest_token_bytes(library, files.vocabulary.keys(), special_tokens)
        """The most bytes of a caller's text that one token stands for, where that is known."""
        try:
            self._special_token_guard = SpecialTokenGuard(library, special_tokens)
        except (RecursionError, OverflowError) as error:
            raise TokenizerError(
                f"{files.path}: too many special tokens begin with one another: use another model"
            ) from error
        self._longest_rendered = None
        """The most characters of a rendered template that one token stands for, where that is known."""
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

    @classmethod
    def load(
        cls,
        directory: Path,
        chat_template: Path | None = None,
        num_rows: int | None = None,
        template_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> "Tokenizer":
        """Of a directory in Hugging Face's layout. ``chat_template`` is a file that takes the place of the model's own
        template, or the name of one of those. ``num_rows``: of the model, where it may have fewer than the tokenizer
        has tokens. ``template_timeout_s``: the processor time for rendering a conversation.

        Raises TokenizerError.
        """
        return cls(read_tokenizer(directory, chat_template, num_rows, template_timeout_s))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be prompts."""
        return DEFAULT_TEMPLATE in self._templates

    def chat_template(self, with_tools: bool) -> ChatTemplate:
        """The template of conversations with tools, or of those without. Raises ServiceError."""
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
        """A caller's text. With ``add_special_tokens`` the tokenizer puts its own around it, such as a beginning of
        sequence, which ``truncation`` leaves there; in the text there are none. Raises ServiceError, also where there
        are more tokens than ``limit`` allows, which does not count for a text that is truncated."""
        _check_size((text,), "text")
        token_ids = self._special_token_guard.encode(
            text, add_special_tokens, limit=limit if truncation is None else None
        )
        if truncation is None or len(token_ids) <= truncation.max_tokens:
            return token_ids
        if not add_special_tokens or not self._library.num_special_tokens_to_add(False):
            return truncation.cut(token_ids)
        return truncation.cut_inside(token_ids, self._special_token_guard.encode(text, False))

    def encode_chat(self, chat: TemplateInput, limit: PromptLimit | None = None) -> list[int]:
        """A conversation: special tokens where the template has them, none where a text of the caller's does.

        Raises ServiceError, also where there are more tokens than ``limit`` allows.
        """
        rendered = self._template_of(chat).render(chat)
        self._check_rendered(rendered, limit)
        return self._special_token_guard.encode_template(rendered, limit=limit)

    def encode_after(self, text: str, limit: PromptLimit | None = None) -> list[int]:
        """A caller's text that follows other tokens: tokenized by itself, without special tokens and without the space
        that some tokenizers put before a beginning. Raises ServiceError as ``encode`` does."""
        _check_size((text,), "text")
        return self._special_token_guard.encode(text, False, follows=True, limit=limit)

    def encode_chat_after(self, chat: TemplateInput, limit: PromptLimit | None = None) -> list[int]:
        """New messages of a conversation whose tokens end with an answer of the assistant's: the end of that turn, and
        the messages. Raises ServiceError as ``encode_chat`` does."""
        rendered = self._template_of(chat).render_after_answer(chat)
        self._check_rendered(rendered, limit)
        return self._special_token_guard.encode_template(rendered, follows=True, limit=limit)

    def _check_rendered(self, rendered: str, limit: PromptLimit | None) -> None:
        """Refuses what has too many tokens whatever they are. Raises ServiceError."""
        if limit is not None and self._longest_rendered is not None:
            limit.check_at_least(-(-len(rendered) // self._longest_rendered))

    def render_chat(self, chat: TemplateInput) -> str:
        """A conversation as the text that the template makes of it. Raises ServiceError."""
        return str.__str__(self._template_of(chat).render(chat))

    def decode(self, token_ids: Sequence[int], include_special_tokens: bool = False) -> str:
        """The text of ids below ``vocab_size``; what is no character becomes U+FFFD."""
        # A batch of one: see ``SpecialTokenGuard`` on Python's lock.
        text: str
        [text] = self._library.decode_batch([token_ids], skip_special_tokens=not include_special_tokens)
        return text

    def special_tokens_in(self, text: str) -> dict[int, str]:
        """The special tokens that a text spells, by their ids."""
        named = ((token_id, self.pieces.all[token_id]) for token_id in self.special_ids)
        return {token_id: content for token_id, content in named if content and content in text}

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words: as they stand, and after a space, where a tokenizer tells the two apart."""
        spelled = (spelling for word in words for spelling in (word, f" {word}"))
        sequences = (tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spelled)
        # The model has no row for a token of larger id, so that it never writes such a sequence.
        possible = (ids for ids in sequences if ids and max(ids) < self.vocab_size)
        return tuple(dict.fromkeys(possible))

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Refuses tokens of a prompt that the model does not have. Raises ServiceError."""
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
        """The template of a conversation whose texts are not too long. Raises ServiceError."""
        texts = (text for message in chat.messages for text in (message.role, message.content, message.reasoning))
        _check_size([text for text in texts if text is not None], "chat")
        return self.chat_template(bool(chat.tools))


def _mark_special(library: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Has the library treat these tokens as special; their other flags stay."""
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
        raise invalid(field, "is no valid Unicode text: it holds half of a surrogate pair") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise invalid(field, f"at most {MAX_TEXT_BYTES:,} bytes of UTF-8; it has {num_bytes:,}")


class TokenizerPool:
    """Runs what is slow off the event loop, in a few threads, and refuses more than it can hold. Tenants take turns,
    and one tenant never has all threads.

    Long texts have threads of their own, so that a short one never waits for them. The threads run side by side: the
    library lets go of Python's lock while it encodes.
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
        """``num_threads`` may work for one tenant: one on what is long, the others on the rest, for which there is at
        least one. ``max_waiting_bytes`` may wait on either side, and half of that of one tenant."""
        self.tokenizer = tokenizer
        self._block_size = block_size
        self._max_prompt_tokens = max_prompt_tokens
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

    async def run(self, work: Callable[[], T], num_bytes: int, tenant: str | None = None) -> T:
        """Runs ``work`` in a thread; ``num_bytes`` is how much input it holds while it waits. ``tenant``: whose work it
        is; None is the caller's own.

        Raises what ``work`` raises, and ServiceError PREPARATION_FULL. Work that has begun goes on when its caller is
        cancelled; any other is dropped.
        """
        lane = self._long if num_bytes > _LONG_BYTES else self._short
        return await lane.run(work, num_bytes, current_principal.get(_NOBODY).tenant if tenant is None else tenant)

    def limit(self, field: str, room_for_output: int = 1) -> PromptLimit:
        """The most tokens of a prompt that stands in ``field``, by the model's context."""
        return PromptLimit(self._context - room_for_output, field)

    def limit_after(self, context: Context, field: str) -> PromptLimit:
        """The same for a prompt that begins with a context."""
        return PromptLimit(self._max_prompt_tokens, field, len(context.token_ids))

    def check_text(self, text: str, field: str = "text", room_for_output: int = 1) -> None:
        """Refuses at once a prompt that has too many tokens whatever they are. Raises ServiceError."""
        longest = self.tokenizer.longest_token_bytes
        # No character is less than a byte, so their number, which is there already, will do.
        if longest is not None:
            self.limit(field, room_for_output).check_at_least(-(-len(text) // longest))

    def prompt(self, token_ids: list[int], salt: bytes, limit: PromptLimit) -> Prompt:
        """Checks a prompt's ids and hashes its blocks; to be called in ``run``'s work. Raises ServiceError."""
        limit.check(len(token_ids))
        self.tokenizer.check_ids(token_ids, limit.field)
        return Prompt(token_ids, hash_blocks(token_ids, self._block_size, salt))

    def continued(self, context: Context, token_ids: list[int], salt: bytes, limit: PromptLimit) -> Prompt:
        """The same for a prompt that begins with a context: that was checked once, and its known hashes still hold."""
        limit.check(len(token_ids))
        self.tokenizer.check_ids(token_ids, limit.field)
        whole = context.token_ids + token_ids
        known = context.block_hashes
        parent = known[-1] if known else b""
        rest = whole[len(known) * self._block_size :]
        return Prompt(whole, known + hash_blocks(rest, self._block_size, salt, parent))

    def close(self) -> None:
        """Ends the threads; work that has not begun is cancelled."""
        self._short.close()
        self._long.close()
