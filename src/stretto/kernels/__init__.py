"""Faster ways to compute the same numbers. Nothing here changes a result; who reads how stretto works can pass it
by."""
