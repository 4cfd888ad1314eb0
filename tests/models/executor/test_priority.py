"""Priorities of threads."""

import os
import sys

from penstock.models.executor import priority


def test_priorities_are_lowered_on_linux_only(monkeypatch):
    """Elsewhere a thread's id may be another process's."""
    lowered = []
    monkeypatch.setattr(os, "setpriority", lambda *args: lowered.append(args))
    monkeypatch.setattr(sys, "platform", "darwin")
    priority.lower_priority(5)
    assert lowered == []
    monkeypatch.setattr(sys, "platform", "linux")
    priority.lower_priority(5)
    assert lowered == [(os.PRIO_PROCESS, 5, priority.BACKGROUND_NICE)]
