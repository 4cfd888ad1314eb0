"""Finds the head that classifies and scores texts: the model's own, or that of two tokens."""

import logging
from collections.abc import Callable

from penstock.models.checkpoint.classification_head import TOKENS_FLAG, ClassificationHead, head_of_tokens, read_head
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.service.config.flag_checks import read_score_tokens
from penstock.service.config.serve_config import ServeConfig
from penstock.service.config.speculative import NONE
from penstock.service.text.text_pairs import TextPairs
from penstock.service.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def find_head(
    config: ServeConfig, checkpoint: CheckpointInfo, load_tokenizer: Callable[[], Tokenizer]
) -> tuple[ClassificationHead | None, Callable[[], Tokenizer]]:
    """Returns the head, or None, and a function for the tokenizer, which is read at most once. Raises ModelError and
    TokenizerError."""
    if config.score_tokens is not None:
        tokenizer = load_tokenizer()
        return _head_of_tokens(read_score_tokens(config.score_tokens), checkpoint, tokenizer), lambda: tokenizer
    if checkpoint.classifier is None:
        return None, load_tokenizer
    if config.speculative_config not in (None, NONE):
        raise ModelError("--speculative-config: a model with a classification head generates nothing: leave it out")
    return read_head(checkpoint.classifier, checkpoint.spec.hidden_size), load_tokenizer


def _head_of_tokens(names: tuple[str, str], checkpoint: CheckpointInfo, tokenizer: Tokenizer) -> ClassificationHead:
    token_ids = []
    for name in names:
        token_id = tokenizer.token_id(name)
        if token_id is None:
            raise ModelError(
                f"{TOKENS_FLAG}: {name!r} is not a token of the model: write it as the vocabulary of tokenizer.json "
                "has it"
            )
        token_ids.append(token_id)
    if not TextPairs(tokenizer).has_template:
        _log.warning(
            "%s: the model has no chat template with the roles query and document, so these are joined without one; "
            "give the template that the model was trained with by --chat-template",
            TOKENS_FLAG,
        )
    no, yes = token_ids
    return head_of_tokens(checkpoint, (no, yes), names)
