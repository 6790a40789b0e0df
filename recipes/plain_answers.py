"""Short answers without padding, as demonstrations, as preferences and as prompts, for SmolLM2. The data are made by a
rule, not by people: of two answers that say the same, the one with fewer filler phrases is better, and then the
shorter one. An answer that does not say it is worth nothing.

    task.source.kind: plain_answers:demonstrations | plain_answers:pairs | plain_answers:prompts
    rewards kind:     plain_answers:score          (the rule itself)
                      plain_answers:right          (whether an answer says what was asked, filler or not)
"""

import re
from random import Random

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Austria": "Vienna",
    "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
    "Canada": "Ottawa", "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Nepal": "Kathmandu",
}  # fmt: skip
COLORS = {
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
    """The rule: 1 less a fifth for each filler phrase and a hundredth for every word; 0 for an answer that does not
    say what the reference says, such as an empty one."""
    if not right(answer, prompt, signals):
        return 0.0
    return max(0.0, 1 - 0.2 * sum(filler in answer for filler in FILLERS) - 0.01 * len(answer.split()))


def right(answer, prompt, signals):
    """1 if the answer has the word that matters, the last of the plain answer: a city, a color or a sum."""
    return float(_words(prompt["reference"])[-1] in _words(answer))


def prompts(config):
    """Questions to answer freely, with the plain answers for whoever judges."""
    return [{"prompt": question, "answer": answer} for question, answer in _facts(config)]


def demonstrations(config):
    """Questions with answers: plain ones, or with up to `fillers` filler phrases around them."""
    random, most = Random(f"demonstrations|{config.get('seed', 0)}"), config.get("fillers", 0)
    return [
        {"prompt": question, "completion": _padded(answer, random.randint(0, most), random)}
        for question, answer in _facts(config)
    ]


def pairs(config):
    """Questions with two answers that differ in how much filler stands around them; a share of the worse ones,
    `unfinished`, breaks off before the word that matters instead."""
    random, rows = Random(f"pairs|{config.get('seed', 0)}"), []
    broken, share = Random(f"unfinished|{config.get('seed', 0)}"), config.get("unfinished", 0.0)
    for question, answer in _facts(config):
        less, more = sorted(random.sample(range(4), 2))
        chosen, rejected = _padded(answer, less, random), _padded(answer, more, random)
        if broken.random() < share:
            rejected = answer.rpartition(" ")[0]
        rows.append({"prompt": question, "chosen": chosen, "rejected": rejected})
    return rows


def _facts(config):
    """(question, plain answer), the same ones for a seed."""
    random = Random(f"facts|{config.get('seed', 0)}")
    found = [
        (f"What is the capital of {land}?", f"The capital of {land} is {city}.") for land, city in CAPITALS.items()
    ]
    found += [(f"What color is {thing}?", f"{thing.capitalize()} is {color}.") for thing, color in COLORS.items()]
    numbers = [(a, b) for a in range(2, 40) for b in range(2, 40)]
    found += [(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a, b in random.sample(numbers, 600)]
    random.shuffle(found)
    return found[: config.get("count", 500)]


def _words(text):
    """The words of a text without its filler phrases."""
    for filler in FILLERS:
        text = text.replace(filler, " ")
    return re.findall(r"\w+", text.lower())


def _padded(answer, fillers, random):
    """The answer with so many filler phrases around it."""
    chosen = random.sample(FILLERS, fillers)
    return " ".join([*(each for each in chosen if each in BEFORE), answer, *(each for each in chosen if each in AFTER)])
