"""The engine of stretto: continuous batching on the very modules that are trained."""
