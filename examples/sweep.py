"""Three learning rates, one run each, and a table of what they came to.

    .venv/bin/python examples/sweep.py [key=value ...]

It trains the recipe in own_reward/ with the same seed and the same prompts, so that only the learning rate differs.
Stopped and called again, it goes on where it was.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import stretto

RECIPE = Path(__file__).parent / "own_reward" / "letters.yaml"
RATES = (5.0e-4, 2.0e-3, 8.0e-3)


def main(changes: Sequence[str] = ()) -> None:
    """Prints a row for each learning rate."""
    print(stretto.sweep(RECIPE, {"optimizer.lr": RATES}, changes=changes, quiet=True))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except stretto.StrettoError as error:
        sys.exit(str(error))
