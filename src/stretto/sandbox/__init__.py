"""Where the user's Python runs: worker processes with deadlines, so that nothing of theirs can hang or kill a run.

`pool` is the seam (`await pool.call("module:name", *args, deadline=...)`), `process` one worker as the parent sees it,
`worker` what runs inside it, `target` the question whether `module:name` exists, answered without importing it.

This is a fence against accidents in code that the user chose to run, not a jail: a worker has the user's rights, files,
environment and network. Code written by a model does not belong here.
"""
