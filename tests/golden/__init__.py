"""Golden runs: a few steps of every method, whose numbers must not change by accident.

`python -m tests.golden` runs them, shows what differs from the files, and rewrites those that do.
"""
