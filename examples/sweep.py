"""Three learning rates, one run each, and a table of what they came to.

    .venv/bin/python examples/sweep.py [key=value ...]

It trains the recipe in own_reward/ with the same seed and the same prompts, so that only the learning rate differs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import stretto

RECIPE = Path(__file__).parent / "own_reward" / "letters.yaml"
RATES = (5.0e-4, 2.0e-3, 8.0e-3)


def main(changes: Sequence[str] = ()) -> None:
    """Prints a row for each learning rate."""
    print(f"{'lr':>8}  {'reward':>6}  {'accuracy':>8}  run")
    for rate in RATES:
        run = stretto.train(RECIPE, changes=[*changes, {"optimizer.lr": rate}], name="sweep", quiet=True)
        reward = run.metrics[-1]["reward/mean"]
        print(f"{rate:8.0e}  {reward:6.3f}  {run.evaluate().accuracy:8.2f}  {run.folder}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except stretto.StrettoError as error:
        sys.exit(str(error))
