"""Formats a request's timeline so that an operator on call sees immediately where the time went."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC

import penstock.v1 as pb
from penstock.clients.cli.admin.timeline_words import end_name, event_words, hold_words, wait_words
from penstock.clients.cli.as_dict import seconds_of

_WIDTH = 32
"""The width of the bars, which span the time from the request's arrival to its end."""

_RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _DIM = "31", "32", "33", "34", "35", "36", "2"


@dataclass(frozen=True)
class _Style:
    """The display of entries of one kind."""

    colour: str
    bar: str = "◆"
    plain_bar: str = "+"
    """The bar for terminals without these characters."""


_STYLES = {
    pb.TIMELINE_KIND_ACCEPTED: _Style(_DIM),
    pb.TIMELINE_KIND_WAITED: _Style(_YELLOW, bar="░", plain_bar="."),
    pb.TIMELINE_KIND_BEGAN: _Style(_DIM),
    pb.TIMELINE_KIND_PREFILLED: _Style(_BLUE, bar="▓", plain_bar="#"),
    pb.TIMELINE_KIND_DECODED: _Style(_GREEN, bar="█", plain_bar="="),
    pb.TIMELINE_KIND_PREEMPTED: _Style(_MAGENTA),
    pb.TIMELINE_KIND_RESTARTED: _Style(_RED),
    pb.TIMELINE_KIND_HELD: _Style(_MAGENTA, bar="▒", plain_bar="~"),
    pb.TIMELINE_KIND_UPDATED: _Style(_CYAN),
    pb.TIMELINE_KIND_INJECTED: _Style(_CYAN),
    pb.TIMELINE_KIND_ENDED: _Style(_DIM),
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
        self._total_s = max(map(_end_s, response.timeline), default=0.0)

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
        total = _span(self._total_s)
        if response.end:
            style = _GREEN if response.end in (pb.REQUEST_END_STOP, pb.REQUEST_END_LENGTH) else _RED
            state = self._paint(f"ended: {end_name(response.end)}, after {total}", style)
        else:
            state = self._paint(f"live for {total}", _CYAN)
        yield f"request      {response.request_id}  {state}"
        own_id = f"  (the caller's id: {response.client_request_id})" if response.client_request_id else ""
        yield f"tenant       {response.tenant}{own_id}"
        arrived = response.arrive_time.ToDatetime(UTC)
        yield f"arrived      {arrived:%Y-%m-%d %H:%M:%S}.{arrived.microsecond // 1000:03d} UTC"
        if response.max_tokens:
            choices = f" for each of {response.num_choices} choices" if response.num_choices > 1 else ""
            yield f"prompt       {response.prompt_tokens:,} tokens; up to {response.max_tokens:,} of output{choices}"
            yield f"first token  {self._first_token()}"
        else:  # embeddings, classes and scores have no output
            yield f"inputs       {response.num_choices:,}, with {response.prompt_tokens:,} tokens in total; no output"
        if self._total_s and not response.omitted_entries:
            yield f"time         {self._shares()}"

    def _first_token(self) -> str:
        response = self._response
        if response.HasField("time_to_first_token"):
            real = f"after {_span(seconds_of(response.time_to_first_token))}"
        else:
            real = "none" if response.end else "none yet"
        if not response.HasField("predicted_ttft"):
            return f"{real}; none was predicted"
        return f"{real}; predicted after {_span(seconds_of(response.predicted_ttft))}"

    def _shares(self) -> str:
        """Returns the shares of the first choice's time."""
        spent = {
            kind: sum(
                seconds_of(entry.duration)
                for entry in self._response.timeline
                if entry.kind == kind and not entry.choice
            )
            for kind, _ in _SHARES
        }
        shares = [f"{100 * spent[kind] / self._total_s:.0f} % {words}" for kind, words in _SHARES if spent[kind]]
        of_first = " (of choice 0)" if self._response.num_choices > 1 else ""
        return ", ".join(shares or ["nothing was computed"]) + of_first

    def _entry(self, entry: pb.TimelineEntry) -> str:
        style = _STYLES.get(entry.kind, _Style(_DIM, bar="?", plain_bar="?"))
        start_s, duration_s = seconds_of(entry.start_offset), seconds_of(entry.duration)
        lasted = f"{duration_s:9.3f}" if duration_s else " " * 9
        choice = f"  #{entry.choice:<5}" if self._response.num_choices > 1 else ""
        goes_on = bool(not self._response.end and duration_s and _end_s(entry) == self._total_s)
        colour = "" if style.colour in (_GREEN, _BLUE) else style.colour
        text = self._paint(_words(entry, self._response.request_id, goes_on), colour)
        return f"{start_s:9.3f} {lasted}  {self._bar(entry, style)}{choice}  {text}"

    def _bar(self, entry: pb.TimelineEntry, style: _Style) -> str:
        scale = _WIDTH / max(1e-6, self._total_s)
        start = min(_WIDTH - 1, int(seconds_of(entry.start_offset) * scale))
        stop = max(start + 1, min(_WIDTH, round(_end_s(entry) * scale)))
        mark = style.bar if self._unicode else style.plain_bar
        return " " * start + self._paint(mark * (stop - start), style.colour) + " " * (_WIDTH - stop)

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour and text else text


def _end_s(entry: pb.TimelineEntry) -> float:
    # Whole microseconds are added, so that entries that end now have equal ends.
    return (entry.start_offset.ToMicroseconds() + entry.duration.ToMicroseconds()) / 1e6


def _words(entry: pb.TimelineEntry, request_id: str, goes_on: bool) -> str:
    """Describes an entry of the timeline of the request ``request_id``."""
    match entry.kind:
        case pb.TIMELINE_KIND_WAITED:
            text = f"{'waits' if goes_on else 'waited'} for {wait_words(entry.wait)}"
        case pb.TIMELINE_KIND_BEGAN:
            found = _tokens(entry.num_tokens) if entry.num_tokens else "nothing"
            text = f"began: {found} from the cache{_missed(entry)}"
        case pb.TIMELINE_KIND_PREFILLED:
            text = f"computed {_tokens(entry.num_tokens)}{_chunks(entry)}"
        case pb.TIMELINE_KIND_DECODED:
            so_far = " so far" if goes_on else ""
            text = f"generated {_tokens(entry.num_tokens)}{so_far}{_speed(entry)}{_drafts(entry)}"
        case pb.TIMELINE_KIND_HELD:
            text = f"{'is' if goes_on else 'was'} held: {hold_words(entry.hold_cause)}"
        case _:
            text = event_words(entry, request_id)
    return text + _steps(entry)


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _missed(entry: pb.TimelineEntry) -> str:
    return f", {entry.missed_tokens:,} more without a saved state" if entry.missed_tokens else ""


def _chunks(entry: pb.TimelineEntry) -> str:
    num_chunks = entry.last_step - entry.first_step + 1
    return f" in {num_chunks} chunks of {entry.num_tokens // num_chunks:,}" if num_chunks > 1 else ""


def _speed(entry: pb.TimelineEntry) -> str:
    # The duration starts with the first token.
    following = entry.num_tokens - 1
    duration_s = seconds_of(entry.duration)
    return f", {following / duration_s:,.0f} per second" if duration_s and following > 0 else ""


def _drafts(entry: pb.TimelineEntry) -> str:
    if not entry.HasField("drafts"):
        return ""
    return f", {entry.drafts.accepted_tokens:,} of {entry.drafts.drafted_tokens:,} drafts accepted"


def _steps(entry: pb.TimelineEntry) -> str:
    if not entry.HasField("first_step"):
        return ""
    if entry.first_step >= entry.last_step:
        return f" (step {entry.first_step})"
    return f" (steps {entry.first_step} to {entry.last_step})"


def _span(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
