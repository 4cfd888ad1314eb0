"""Tokenizes pairs of a query and a document as the model was trained on them: by its chat template if that has roles
for both, otherwise as its tokenizer joins two texts."""

from dataclasses import replace

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.errors import ServiceError, invalid
from penstock.service.text.prompt_limit import PromptLimit, TextLimit
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.truncation import Truncation

QUERY, DOCUMENT, INSTRUCTION = "query", "document", "system"
"""The roles of a template for pairs, as in vLLM."""
_MAX_CUTS = 4
"""The maximum number of times that a document is cut. A cut may change the tokens beside it, so one may not do."""


class TextPairs:
    """Tokenizes pairs for one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.has_template = {QUERY, DOCUMENT} <= tokenizer.template_roles
        """Whether pairs are rendered, possibly with an instruction."""

    def encode(
        self, query: str, document: str, instruction: str | None, truncation: Truncation | None, limit: PromptLimit
    ) -> list[int]:
        """Returns the ids of a pair; special tokens spelled in its texts are ordinary text. ``instruction`` is only for
        a template. Raises ServiceError, also if there are more tokens than ``limit`` allows; before it is truncated, a
        pair may have as many as a ``TextLimit`` allows."""
        if truncation is not None:
            limit = TextLimit(field=limit.field)
        if not self.has_template:
            return self._tokenizer.encode_pair(query, document, truncation, limit)
        before = [] if instruction is None else [TemplateMessage(INSTRUCTION, instruction)]
        before.append(TemplateMessage(QUERY, query))
        try:
            return self._rendered(before, document, truncation, limit)
        except ServiceError as error:
            if error.field != "chat":
                raise
            message = limit.field + error.message.removeprefix("chat")
            raise ServiceError(error.reason, message, field=limit.field) from None

    def _rendered(
        self, before: list[TemplateMessage], document: str, truncation: Truncation | None, limit: PromptLimit
    ) -> list[int]:
        chat = TemplateInput([*before, TemplateMessage(DOCUMENT, document)])
        ids = self._tokenizer.encode_chat(chat, limit)
        for _ in range(_MAX_CUTS):
            if truncation is None or len(ids) <= truncation.max_tokens:
                return ids
            document = self._tokenizer.shortened(document, len(ids) - truncation.max_tokens, truncation.keeps_first)
            ids = self._tokenizer.encode_chat(replace(chat, messages=[*before, TemplateMessage(DOCUMENT, document)]))
        if truncation is None or len(ids) <= truncation.max_tokens:
            return ids
        raise invalid(
            limit.field,
            f"truncate_prompt_tokens is {truncation.max_tokens:,}, and the pair has {len(ids):,} tokens with the "
            "shortest document; allow more, or shorten the query",
        )
