"""Accepts or refuses requests, by limits, deadline and predicted waiting time."""
