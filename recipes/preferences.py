"""A preference task whose rule is known, for the chain SFT -> reward model -> PPO. Everything here is synthetic.

A prompt is a string of digits such as "4271=". The best answer is its complement, digit by digit: "5728". The rule
scores an answer by how near it comes. Demonstrations are answers that are a few digits off everywhere, so that
imitation ends at a mediocre score; pairs compare two such answers, or one with an answer of the wrong length. A reward
model that has learned the rule from pairs lets reinforcement go beyond the demonstrations.

    task.source.kind: preferences:demonstrations | preferences:pairs | preferences:prompts
    rewards kind:     preferences:score            (the rule itself, to see what the model is worth in truth)
"""

from random import Random

DIGITS = 4
"""Digits of a prompt."""
SPREAD = 4
"""How far a digit of a demonstration may be off."""
BROKEN = 0.2
"""Share of the pairs whose worse answer has the wrong length."""
GAP = 0.08
"""Least difference of the scores of a pair."""


def score(answer, prompt, signals):
    """The rule: 1 for the complement, less for every digit that is off; one too many or too few counts as all off."""
    return closeness(answer.strip(), prompt["messages"][-1]["content"].rstrip("="))


def closeness(answer, digits):
    both = zip(answer, digits, strict=False)
    near = sum(1 - abs(int(said) - wanted(digit)) / 9 for said, digit in both if said in "0123456789")
    return near / max(len(digits), len(answer))


def wanted(digit):
    """What stands in the place of a digit in the best answer."""
    return 9 - int(digit)


def prompts(config):
    """Prompts without answers: `count` different ones; with other `seed`s, others."""
    return [{"id": digits, "prompt": f"{digits}="} for digits in _strings(config)]


def demonstrations(config):
    """Prompts with an answer that is roughly right."""
    random = Random(f"demonstrations|{config.get('seed', 0)}")
    return [
        {"id": digits, "prompt": f"{digits}=", "completion": _roughly(digits, random)} for digits in _strings(config)
    ]


def pairs(config):
    """Prompts with two rough answers, of which the rule prefers one."""
    random = Random(f"pairs|{config.get('seed', 0)}")
    return [_pair(digits, random) for digits in _strings(config)]


def _pair(digits, random):
    while True:
        answers = [_roughly(digits, random) for _ in range(2)]
        if random.random() < BROKEN:
            answers[1] = _broken(answers[1], random)
        worse, better = sorted(answers, key=lambda answer: closeness(answer, digits))
        if closeness(better, digits) - closeness(worse, digits) >= GAP:
            return {"id": digits, "prompt": f"{digits}=", "chosen": better, "rejected": worse}


def _roughly(digits, random):
    off = (wanted(digit) + random.randint(-SPREAD, SPREAD) for digit in digits)
    return "".join(str(min(9, max(0, number))) for number in off)


def _broken(answer, random):
    """The answer with a digit too many or too few."""
    place = random.randrange(len(answer))
    return answer[:place] + (answer[place] * 2 if random.random() < 0.5 else "") + answer[place + 1 :]


def _strings(config):
    """Different strings of digits, always the same ones for a seed."""
    random = Random(f"strings|{config.get('seed', 0)}")
    wanted_count, found = config.get("count", 4000), {}
    while len(found) < wanted_count:
        found[f"{random.randrange(10**DIGITS):0{DIGITS}d}"] = None
    return list(found)
