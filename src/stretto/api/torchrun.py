"""What to do under `torchrun` or `accelerate launch`, which start a command once per device.

stretto starts its processes itself, from one command. Several copies of that command would each begin a run of their
own, or wait for each other; so all but the first end at once, and the first says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.errors import RecipeError


def first_of(environment: Mapping[str, str], *, command: str) -> bool:
    """False in every copy but the first, which is to end in silence; the first of several raises a RecipeError.

    True where the command was started once. A launcher is known by the variables that it sets; it must not see a copy
    fail before the first has spoken, because it then stops the others.
    """
    told = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if "MASTER_ADDR" not in environment or not all(word.isascii() and word.isdigit() for word in told):
        return True
    rank, copies = map(int, told)
    if copies < 2:
        return True
    if rank > 0:
        return False
    raise RecipeError.of(
        "WORLD_SIZE",
        f"a launcher such as torchrun or accelerate started {copies} copies of this command, and stretto starts its "
        "processes itself",
        f"run `stretto {command}` once, without the launcher (in a job that sets RANK and WORLD_SIZE, unset them)",
    )
