"""Output streams: their messages, their pacing, and slow readers."""
