"""The run folder on disk: files that a kill leaves whole, checkpoints, the lock."""
