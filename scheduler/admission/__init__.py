"""Decides whether a request may enter, by its bounds, its deadline and its predicted waiting time."""
