"""Reads a model's vocabulary from tokenizer.json. Uses no tokenizer library."""

import msgspec


class Vocabulary(msgspec.Struct):
    """The file's ``model`` object: names and ids, or for Unigram names and scores in the order of the ids."""

    vocab: dict[str, int] | list[tuple[str, float]]

    def ids(self) -> dict[str, int]:
        """The token ids by name, without added tokens."""
        if isinstance(self.vocab, dict):
            return self.vocab
        return {name: token_id for token_id, (name, _) in enumerate(self.vocab)}
