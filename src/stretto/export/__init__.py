"""What becomes of a run's model outside of the run: talked to, merged, written as GGUF, published.

Everything here reads a run's folder and changes nothing in its checkpoints. What is written is proved to answer as the
run does before it gets its name.
"""
