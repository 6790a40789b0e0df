"""Measures stretto against what a user would otherwise pick: the same work, side by side, in one run.

Not a profiler and not a test: nothing in the suite asserts a time. A bench is a list of jobs, each in a fresh process,
and the rows that follow from what they measured.
"""
