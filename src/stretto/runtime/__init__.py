"""A run: the loop on one page, the folder it writes, the checkpoints it can go on from, and its evaluation."""
