"""Kernels for CPUs: attention in tiles, packed matrix products, decoding and backward written out."""
