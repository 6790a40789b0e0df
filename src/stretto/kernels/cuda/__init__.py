"""Kernels for CUDA: FlexAttention over packed rows, decode steps recorded as graphs."""
