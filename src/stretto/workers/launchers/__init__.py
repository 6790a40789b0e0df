"""Ways to start a worker: a thread of this process, or a process of Ray."""
