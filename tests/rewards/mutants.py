"""Programs that were right and are no longer: a token or a line is lost, doubled or swapped, or the end is missing."""

import random
import re

TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
OTHERS = [
    "0",
    "1",
    "-1",
    "None",
    "grid",
    "len",
    "(",
    ")",
    "[",
    "]",
    "+",
    "*",
    "//",
    "**",
    "==",
    ":",
    "while True",
    "import os",
]


def mutant(program: str, seed: int) -> str:
    """The program with one to four things wrong; the same for the same seed."""
    draw = random.Random(seed)
    tokens = TOKEN.findall(program)
    for _ in range(draw.randint(1, 4)):
        place, other = draw.randrange(len(tokens)), draw.randrange(len(tokens))
        match draw.randrange(6):
            case 0:
                tokens[place] = ""
            case 1:
                tokens[place] *= 2
            case 2:
                tokens[place], tokens[other] = tokens[other], tokens[place]
            case 3:
                tokens[place] = draw.choice(OTHERS)
            case 4:
                tokens[place] = str(draw.choice([10**9, 10**30, -(10**5), 31, 1e300]))
            case 5:
                tokens = tokens[: max(place, 10)]
    return "".join(tokens)
