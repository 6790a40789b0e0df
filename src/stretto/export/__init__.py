"""What becomes of a run's model outside of the run: talked to, merged, written as GGUF, published.

Everything here reads a run's folder. Nothing in its checkpoints is changed, but for where an adapter's base is, after a
move. What is written is proved to answer as the run does before it gets its name.
"""
