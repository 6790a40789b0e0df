"""From requests to completions: the seam of an engine, and the engines."""
