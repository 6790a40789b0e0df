"""Tasksets of verifiers (its `v1`), played by verifiers' own machinery with our model at the other end.

`tasksets` finds and loads one, `player` is the agent that plays in this process, and `environment` runs an episode. No
other file imports verifiers, which takes seconds and changes often; nothing here is imported before a taskset is named.
"""
