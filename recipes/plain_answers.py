"""Short answers without padding, as demonstrations and as preferences, for SmolLM2. The data are made by a rule, not by
people: of two answers that say the same, the one with fewer filler phrases is better, and then the shorter one.

    task.source.kind: plain_answers:demonstrations | plain_answers:pairs
    rewards kind:     plain_answers:score          (the rule itself)
"""

from random import Random

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Austria": "Vienna",
    "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
    "Canada": "Ottawa", "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Nepal": "Kathmandu",
}  # fmt: skip
COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "a ripe banana": "yellow", "a clear sky": "blue",
    "blood": "red", "a carrot": "orange", "milk": "white", "a lime": "green", "a flamingo": "pink",
}  # fmt: skip
BEFORE = (
    "That is a great question!",
    "Well, let me think about that for a moment.",
    "I would be happy to help you with that.",
    "As you may know,",
)
AFTER = (
    "I hope that this helps!",
    "Please let me know if you have any other questions.",
    "Thank you for asking.",
    "There is much more to say about that, of course.",
)
FILLERS = (*BEFORE, *AFTER)


def score(answer, prompt, signals):
    """The rule: 1 for an answer without filler, less for each filler phrase and for every ten words."""
    return max(0.0, 1 - 0.25 * sum(filler in answer for filler in FILLERS) - 0.02 * len(answer.split()) / 10)


def demonstrations(config):
    """Questions with plain answers."""
    return [{"prompt": question, "completion": answer} for question, answer in _facts(config)]


def pairs(config):
    """Questions with two answers that differ in how much filler stands around them."""
    random, rows = Random(f"pairs|{config.get('seed', 0)}"), []
    for question, answer in _facts(config):
        less, more = sorted(random.sample(range(4), 2))
        rows.append(
            {"prompt": question, "chosen": _padded(answer, less, random), "rejected": _padded(answer, more, random)}
        )
    return rows


def _facts(config):
    """(question, plain answer), the same ones for a seed."""
    random = Random(f"facts|{config.get('seed', 0)}")
    found = [
        (f"What is the capital of {land}?", f"The capital of {land} is {city}.") for land, city in CAPITALS.items()
    ]
    found += [(f"What colour is {thing}?", f"{thing.capitalize()} is {colour}.") for thing, colour in COLOURS.items()]
    numbers = [(a, b) for a in range(2, 40) for b in range(2, 40)]
    found += [(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a, b in random.sample(numbers, 600)]
    random.shuffle(found)
    return found[: config.get("count", 500)]


def _padded(answer, fillers, random):
    """The answer with so many filler phrases around it."""
    chosen = random.sample(FILLERS, fillers)
    return " ".join([*(each for each in chosen if each in BEFORE), answer, *(each for each in chosen if each in AFTER)])
