"""What tokenizer.json says of a model's vocabulary. Knows no tokenizer library."""

import msgspec


class Vocabulary(msgspec.Struct):
    """Of its ``model``: names and ids, or for Unigram names and scores in the order of the ids."""

    vocab: dict[str, int] | list[tuple[str, float]]

    def ids(self) -> dict[str, int]:
        """By name; added tokens are not among them."""
        if isinstance(self.vocab, dict):
            return self.vocab
        return {name: token_id for token_id, (name, _) in enumerate(self.vocab)}
