"""Fault campaigns: many faults of one sort, each followed by the question whether the store still keeps its promises.

`python -m tests.campaign` runs the quick form of all, `--full` the long one; framework.py says what a campaign is.
"""
