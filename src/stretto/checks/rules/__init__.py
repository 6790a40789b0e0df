"""What is refused although every key is well-formed, one small function (or row of a table) per rule.

`reserved` refuses what the recipe format has a name for and this version does not do; `idle` keys that would change
nothing; `limits` numbers that contradict each other; `task` prompts and rewards; `place` the model's files and the
run folder. `checks.recipe` runs them all.
"""
