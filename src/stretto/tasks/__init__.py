"""What the model is asked: prompts with an id, a message and, where there is one, a reference answer.

`source` is the door (`load_prompts`, `peek`, `split`, `PromptSource`). `synthetic` and `reasoning_gym` make prompts,
the latter in a process that runs `gym`; `jsonl` and `hf` read them, and `rows` and `columns` make prompts of what was
read. `template` fills in a message. Datasets are hostile text: nothing in a row is ever run, formatted or taken for a
template.
"""
