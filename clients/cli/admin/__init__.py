"""Commands for operators: statistics, settings, timelines of requests."""
