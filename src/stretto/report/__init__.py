"""What a run shows: progress in the terminal, curves, timelines, TensorBoard. It reads numbers, it makes none."""
