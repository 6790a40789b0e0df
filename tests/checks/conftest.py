"""The small recipe that is right."""

from small_recipe import right  # noqa: F401
