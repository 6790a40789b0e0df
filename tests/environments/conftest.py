"""Tiny models with decided opinions, and requests to ask of them."""

from decided_models import plain_policy, policy, requests_for, tokenizer  # noqa: F401
