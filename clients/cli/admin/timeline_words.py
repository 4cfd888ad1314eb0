"""Describes the entries of a request's timeline: what it waited for, why it was held or preempted."""

from collections.abc import Callable, Mapping

import penstock.v1 as pb
from penstock.clients.cli.as_dict import seconds_of

_SUSPECT = "to find out which one crashed the worker"
_WAITS: Mapping[int, Callable[[pb.WaitDetail], str]] = {
    pb.WAIT_CAUSE_TURN: lambda wait: f"its turn: {wait.requests_ahead:,} ahead of it",
    pb.WAIT_CAUSE_NEXT_STEP: lambda wait: "the next step",
    pb.WAIT_CAUSE_ROWS: lambda wait: f"a row: all {wait.max_rows:,} run",
    pb.WAIT_CAUSE_BLOCKS: lambda wait: f"blocks: {wait.free_blocks:,} are free, {wait.needed_blocks:,} needed",
    pb.WAIT_CAUSE_BUDGET: lambda wait: f"its turn: the step's {wait.step_tokens:,} tokens go to others",
    pb.WAIT_CAUSE_PREFIX: lambda wait: "its prefix, which another request computes",
    pb.WAIT_CAUSE_LAST_RESULT: lambda wait: "the result of its last step",
    pb.WAIT_CAUSE_WORKER: lambda wait: "the new worker",
    pb.WAIT_CAUSE_STATES: lambda wait: f"a slot for its state: all {wait.state_slots:,} are used",
    pb.WAIT_CAUSE_ADAPTER: lambda wait: "its LoRA adapter, which is not in a slot",
}
_HOLDS: Mapping[int, str] = {
    pb.HOLD_CAUSE_UNREAD: "its stream is not read",
    pb.HOLD_CAUSE_SUSPECT: f"few requests run at a time, {_SUSPECT}",
}
_PREEMPTIONS: Mapping[int, str] = {
    pb.PREEMPTION_CAUSE_FEWER_ROWS: "fewer rows may run",
    pb.PREEMPTION_CAUSE_SUSPECT: f"other requests run alone, {_SUSPECT}",
}


def wait_words(wait: pb.WaitDetail) -> str:
    """Returns the words after "waited for"."""
    words = _WAITS.get(wait.cause)
    return "something that this version of penstock does not know" if words is None else words(wait)


def hold_words(cause: int) -> str:
    """Returns the words after "was held:"."""
    return _HOLDS.get(cause, "for a reason that this version of penstock does not know")


def end_name(end: int) -> str:
    """Returns the name of an end, such as STOP."""
    known = pb.RequestEnd.DESCRIPTOR.values_by_number.get(end)
    return str(end) if known is None else known.name.removeprefix("REQUEST_END_")


def event_words(entry: pb.TimelineEntry, request_id: str) -> str:
    """Describes an entry without a duration. ``request_id``: the request whose timeline it is."""
    match entry.kind:
        case pb.TIMELINE_KIND_ACCEPTED:
            return f"accepted: position {entry.queue_position:,} in the queue"
        case pb.TIMELINE_KIND_PREEMPTED:
            return f"preempted: {_preemption_words(entry.preemption, request_id)}"
        case pb.TIMELINE_KIND_RESTARTED:
            return "restarted: the worker died: all is computed again"
        case pb.TIMELINE_KIND_UPDATED:
            return f"changed by its caller: {_update_words(entry.update)}"
        case pb.TIMELINE_KIND_INJECTED:
            return f"injected: {entry.num_tokens:,} token{'' if entry.num_tokens == 1 else 's'} into its output"
        case pb.TIMELINE_KIND_ENDED:
            return f"ended: {end_name(entry.end)}"
        case _:
            return "something that this version of penstock does not know"


def _preemption_words(preemption: pb.PreemptionDetail, request_id: str) -> str:
    for_id = "".join(character if character.isprintable() else "?" for character in preemption.for_request_id)
    match preemption.cause:
        case pb.PREEMPTION_CAUSE_BLOCKS:
            needy = "it" if for_id == request_id else for_id
            return f"no block was free, and {needy} needed {preemption.needed_blocks:,}"
        case pb.PREEMPTION_CAUSE_ORDER:
            return f"there was no room for {for_id}, which goes first"
        case cause:
            return _PREEMPTIONS.get(cause, "for a reason that this version of penstock does not know")


def _update_words(update: pb.UpdateDetail) -> str:
    changes = []
    if update.HasField("priority"):
        changes.append(f"priority {update.priority}")
    if update.HasField("timeout"):
        changes.append(f"deadline in {seconds_of(update.timeout):.1f} s")
    if update.HasField("max_tokens"):
        changes.append(f"at most {update.max_tokens:,} tokens")
    return ", ".join(changes)
