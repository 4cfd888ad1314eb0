"""Formats a request's timeline so that an operator on call sees immediately where the time went."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import penstock.v1 as pb

_WIDTH = 32
"""The width of the bars, which span the time from the request's arrival to its end."""

_RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _DIM = "31", "32", "33", "34", "35", "36", "2"


@dataclass(frozen=True)
class _Style:
    """The display of entries of one kind."""

    colour: str
    event: str = ""
    """The words before an entry's detail."""
    bar: str = "◆"
    plain_bar: str = "+"
    """The bar for terminals without these characters."""


_STYLES = {
    pb.TIMELINE_KIND_ACCEPTED: _Style(_DIM, "accepted: "),
    pb.TIMELINE_KIND_WAITED: _Style(_YELLOW, bar="░", plain_bar="."),
    pb.TIMELINE_KIND_BEGAN: _Style(_DIM),
    pb.TIMELINE_KIND_PREFILLED: _Style(_BLUE, bar="▓", plain_bar="#"),
    pb.TIMELINE_KIND_DECODED: _Style(_GREEN, bar="█", plain_bar="="),
    pb.TIMELINE_KIND_PREEMPTED: _Style(_MAGENTA, "preempted: "),
    pb.TIMELINE_KIND_RESTARTED: _Style(_RED, "restarted: "),
    pb.TIMELINE_KIND_HELD: _Style(_MAGENTA, bar="▒", plain_bar="~"),
    pb.TIMELINE_KIND_UPDATED: _Style(_CYAN, "changed by its caller: "),
    pb.TIMELINE_KIND_ENDED: _Style(_DIM, "ended: "),
}
_SHARES = (
    (pb.TIMELINE_KIND_WAITED, "waiting"),
    (pb.TIMELINE_KIND_HELD, "held back"),
    (pb.TIMELINE_KIND_PREFILLED, "computing its prompt"),
    (pb.TIMELINE_KIND_DECODED, "decoding"),
)


class TimelineView:
    """A timeline as lines for a terminal. ``unicode``: whether it shows more than ASCII."""

    def __init__(self, response: pb.ExplainResponse, *, colours: bool, unicode: bool) -> None:
        self._response = response
        self._colours = colours
        self._unicode = unicode
        self._total_us = max(map(_end_us, response.timeline), default=0)

    def lines(self) -> Iterator[str]:
        yield from self._header()
        yield ""
        choice = "  choice" if self._response.num_choices > 1 else ""
        yield f"{'at, s':>9} {'for, s':>9}  {'':{_WIDTH}}{choice}"
        # Omitted entries are from the middle: the first half of the entries precedes them.
        gap = len(self._response.timeline) // 2 if self._response.omitted_entries else -1
        for index, entry in enumerate(self._response.timeline):
            if index == gap:
                yield self._paint(f"{'':20} ... {self._response.omitted_entries:,} more entries are not kept ...", _DIM)
            yield self._entry(entry)

    def _header(self) -> Iterator[str]:
        response = self._response
        total = _span(self._total_us)
        if response.ended:
            style = _GREEN if response.ended in ("STOP", "LENGTH") else _RED
            state = self._paint(f"ended: {response.ended}, after {total}", style)
        else:
            state = self._paint(f"live for {total}", _CYAN)
        yield f"request      {response.request_id}  {state}"
        own_id = f"  (the caller's id: {response.client_request_id})" if response.client_request_id else ""
        yield f"tenant       {response.tenant}{own_id}"
        arrived = datetime.fromtimestamp(response.arrived_unix_us / 1e6, UTC)
        yield f"arrived      {arrived:%Y-%m-%d %H:%M:%S}.{arrived.microsecond // 1000:03d} UTC"
        if response.max_tokens:
            choices = f" for each of {response.num_choices} choices" if response.num_choices > 1 else ""
            yield f"prompt       {response.prompt_tokens:,} tokens; up to {response.max_tokens:,} of output{choices}"
            yield f"first token  {self._first_token()}"
        else:  # embeddings, classes and scores have no output
            yield f"inputs       {response.num_choices:,}, with {response.prompt_tokens:,} tokens in total; no output"
        if self._total_us and not response.omitted_entries:
            yield f"time         {self._shares()}"

    def _first_token(self) -> str:
        response = self._response
        if response.HasField("first_token_us"):
            real = f"after {_span(response.first_token_us)}"
        else:
            real = "none" if response.ended else "none yet"
        if not response.HasField("predicted_ttft_ms"):
            return f"{real}; none was predicted"
        return f"{real}; predicted after {_span(response.predicted_ttft_ms * 1000)}"

    def _shares(self) -> str:
        """Returns the shares of the first choice's time."""
        spent = {
            kind: sum(entry.duration_us for entry in self._response.timeline if entry.kind == kind and not entry.choice)
            for kind, _ in _SHARES
        }
        shares = [f"{100 * spent[kind] / self._total_us:.0f} % {words}" for kind, words in _SHARES if spent[kind]]
        of_first = " (of choice 0)" if self._response.num_choices > 1 else ""
        return ", ".join(shares or ["nothing was computed"]) + of_first

    def _entry(self, entry: pb.TimelineEntry) -> str:
        style = _STYLES.get(entry.kind, _Style(_DIM, bar="?", plain_bar="?"))
        lasted = f"{entry.duration_us / 1e6:9.3f}" if entry.duration_us else " " * 9
        choice = f"  #{entry.choice:<5}" if self._response.num_choices > 1 else ""
        goes_on = bool(not self._response.ended and entry.duration_us and _end_us(entry) == self._total_us)
        colour = "" if style.colour in (_GREEN, _BLUE) else style.colour
        text = self._paint(_words(entry, style.event, goes_on), colour)
        return f"{entry.at_us / 1e6:9.3f} {lasted}  {self._bar(entry, style)}{choice}  {text}"

    def _bar(self, entry: pb.TimelineEntry, style: _Style) -> str:
        scale = _WIDTH / max(1, self._total_us)
        start = min(_WIDTH - 1, int(entry.at_us * scale))
        stop = max(start + 1, min(_WIDTH, round(_end_us(entry) * scale)))
        mark = style.bar if self._unicode else style.plain_bar
        return " " * start + self._paint(mark * (stop - start), style.colour) + " " * (_WIDTH - stop)

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour and text else text


def _end_us(entry: pb.TimelineEntry) -> int:
    return entry.at_us + entry.duration_us


def _words(entry: pb.TimelineEntry, event: str, goes_on: bool) -> str:
    """Describes an entry. Texts from the service are shown unchanged."""
    detail = "".join(character if character.isprintable() else "?" for character in entry.detail)
    match entry.kind:
        case pb.TIMELINE_KIND_WAITED:
            text = f"{'waits' if goes_on else 'waited'} for {detail}"
        case pb.TIMELINE_KIND_BEGAN:
            text = f"began: {_tokens(entry.num_tokens) if entry.num_tokens else 'nothing'} from the cache"
        case pb.TIMELINE_KIND_PREFILLED:
            text = f"computed {_tokens(entry.num_tokens)}{_chunks(entry)}"
        case pb.TIMELINE_KIND_DECODED:
            so_far = " so far" if goes_on else ""
            drafts = f", {entry.detail}" if entry.detail else ""
            text = f"generated {_tokens(entry.num_tokens)}{so_far}{_speed(entry)}{drafts}"
        case pb.TIMELINE_KIND_HELD:
            text = f"{'is' if goes_on else 'was'} held: {detail}"
        case _:
            text = f"{event}{detail}"
    return text + _steps(entry)


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _chunks(entry: pb.TimelineEntry) -> str:
    num_chunks = entry.last_step - entry.first_step + 1
    return f" in {num_chunks} chunks of {entry.num_tokens // num_chunks:,}" if num_chunks > 1 else ""


def _speed(entry: pb.TimelineEntry) -> str:
    # The duration starts with the first token.
    following = entry.num_tokens - 1
    return f", {following / entry.duration_us * 1e6:,.0f} per second" if entry.duration_us and following > 0 else ""


def _steps(entry: pb.TimelineEntry) -> str:
    if not entry.HasField("first_step"):
        return ""
    if entry.first_step >= entry.last_step:
        return f" (step {entry.first_step})"
    return f" (steps {entry.first_step} to {entry.last_step})"


def _span(microseconds: int) -> str:
    seconds = microseconds / 1e6
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
