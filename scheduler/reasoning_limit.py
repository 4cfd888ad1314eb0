"""The limit on the reasoning of a sequence, as plain data: the worker knows tokens, but neither texts nor formats."""

import msgspec


class MarkerSearch(msgspec.Struct, array_like=True, frozen=True):
    """Finds a marker in a text, token by token. The state is the number of the marker's bytes at the end of the text;
    ``length`` means that it was found."""

    length: int
    moves: tuple[dict[int, int], ...]
    """For each state below ``length``, the next state by token. A missing token has the move of state 0, or none: then
    the text ends with no byte of the marker."""
    at_beginning: bool = False
    """Whether the marker can only be at the beginning of the text, after white space. A token that is not among a
    state's moves then ends the search."""

    def move(self, state: int, token_id: int) -> int:
        """Returns the state after one more token; -1: the search has ended without the marker."""
        found = self.moves[state].get(token_id)
        if found is None and not self.at_beginning:
            return self.moves[0].get(token_id, 0)
        return -1 if found is None else found


class ReasoningLimit(msgspec.Struct, array_like=True, frozen=True):
    """The maximum number of reasoning tokens, and how reasoning opens and closes."""

    max_tokens: int
    is_open: bool
    """Whether the prompt has opened the reasoning."""
    closes: MarkerSearch
    closing: tuple[tuple[int, ...], ...]
    """The tokens that follow once the limit is reached. With more than one entry, entry i is for a text that ends with
    the first i bytes of the closing marker."""
    opens: MarkerSearch | None = None
    """How the output opens reasoning; None: it does not."""
