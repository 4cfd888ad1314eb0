"""Who waits and who runs, each in order of rank. Knows neither blocks nor plans."""

from bisect import bisect_left, insort

from penstock.scheduler.choice import Choice, ChoiceState
from penstock.scheduler.policy import Rank


def _rank(choice: Choice) -> Rank:
    return choice.rank


class WaitingQueue:
    """Choices without a row: new ones, forked ones, preempted ones."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.num_requests = 0
        """Requests that have not begun."""
        self.num_tokens = 0
        """Their prompts' tokens."""

    def put(self, choice: Choice) -> int:
        """Enters a choice; returns how many are ahead of it."""
        insort(self.choices, choice, key=_rank)
        if choice.live.started_at is None:
            self.num_requests += 1
            self.num_tokens += choice.num_prompt_tokens
        return bisect_left(self.choices, choice.rank, key=_rank)

    def remove(self, choice: Choice) -> None:
        """Takes a choice out, while its request's ``started_at`` is still what it was."""
        self.choices.remove(choice)
        if choice.live.started_at is None:
            self.num_requests -= 1
            self.num_tokens -= choice.num_prompt_tokens


class RunningRows:
    """Choices with a row."""

    def __init__(self) -> None:
        self.prefilling: list[Choice] = []
        self.decoding: list[Choice] = []

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def add(self, choice: Choice) -> None:
        """Enters a choice whose row begins."""
        insort(self.prefilling, choice, key=_rank)

    def promote(self, choice: Choice) -> None:
        """All of its history is planned."""
        self.prefilling.remove(choice)
        insort(self.decoding, choice, key=_rank)
        choice.state = ChoiceState.DECODING

    def remove(self, choice: Choice) -> None:
        """Takes a choice out."""
        (self.prefilling if choice.state is ChoiceState.PREFILLING else self.decoding).remove(choice)

    def last(self) -> Choice:
        """The one that loses its blocks first: of the lowest priority, or the latest."""
        return max((row[-1] for row in (self.prefilling, self.decoding) if row), key=_rank)
