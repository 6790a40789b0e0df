"""What is refused although every key is well-formed, one small function (or row of a table) per rule.

`not_available` refuses what the recipe format has a name for and this version does not do; `unused_keys` keys that
would change nothing; `limits` numbers that contradict each other; `kl` a KL without a reference, or one that does not
pull towards it; `roles` and `teacher` the models beside the one that is trained; `rows` what is learned from without
sampling; `task` and `environment` prompts, rewards and conversations; `own_code` functions of the user's; `vllm` what
engines with weights of their own cannot do, and `served` servers of the user's; `files` the model's files and the run
folder. `checks.recipe` runs them all.
"""
