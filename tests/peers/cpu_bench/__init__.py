"""Runs other engines and ours on the same ids, by turns, and compares them: ``make bench-peers``, ``make bench-cpu``.

``wire`` and ``runners`` are read by other environments than ours too, and import nothing of ours but each other.
"""
