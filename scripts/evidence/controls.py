"""Rewards that must not teach anything: controls for learning curves."""

import random


def coin(answer: str, prompt: dict, signals: dict) -> float:
    """A reward that has nothing to do with the answer."""
    return float(random.random() < 0.5)
