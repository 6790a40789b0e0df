"""What the model is asked: prompts with an id, a message and, where there is one, a reference answer.

`source` is the door (`load_prompts`, `peek`, `split`, `PromptSource`). `synthetic` makes prompts, `jsonl` reads them,
`columns` says which column of a row is what, `template` fills in a message. Datasets are hostile text: nothing in a row
is ever run, formatted or taken for a template.
"""
