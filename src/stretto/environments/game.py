"""Games of deduction: a secret that the model never sees, guesses, and what each guess is told.

Two games with one rule. `number`: a whole number of a range; a guess is told higher or lower. `code`: a string over an
alphabet; a guess is told how many characters are right, and how many are right elsewhere. The secret is the prompt's
reference answer. What is left of the possible secrets measures how much a guess was worth.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from stretto.environments.base import Model
from stretto.errors import RolloutError
from stretto.readings import numbers, value
from stretto.recipe.schema import CodeGame, GameSection, NumberGame
from stretto.types import Message, Outcome, Prompt

MOST = 5_000
"""Possible secrets of a game whose guesses can be told apart by what they find out."""
Feedback = Callable[[str, str], str]
"""(secret, guess) -> what the model is told."""


class GameEnvironment:
    """A game as the recipe describes it."""

    def __init__(self, section: GameSection) -> None:
        self.section = section
        match section:
            case NumberGame(range=(low, high)):
                self.feedback: Feedback = partial(compared, section)
                self.secrets = [str(each) for each in range(low, high + 1)] if high - low < MOST else []
            case CodeGame(alphabet=alphabet, length=length):
                self.feedback = partial(matched, section)
                possible = len(alphabet) ** length
                self.secrets = ["".join(each) for each in product(alphabet, repeat=length)] if possible <= MOST else []
                self.code = re.compile(f"[{re.escape(alphabet)}]{{{length}}}")
            case _:
                raise TypeError(f"there is no game {section!r}")

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """One game: won with the right guess, lost after so many turns."""
        secret, left = self._secret(prompt), self.secrets
        messages, worth, won, wrong, said = list(prompt.messages), list[float](), False, 0, ""
        while len(worth) < self.section.turns and not won:
            reply = await model.chat(messages)
            guess, said = self.read(reply.text), reply.text if reply.text else said
            won = guess == secret
            after = left if guess is None else self.consistent(left, guess, secret)
            worth.append(self._gain(left, after))
            wrong += guess is None
            left = after
            if reply.stop == "length" and not reply.text:
                break
            told = self.section.invalid if guess is None else self.feedback(secret, guess)
            messages += [reply, {"role": "user", "content": told}]
        signals = {"won": float(won), "turns": float(len(worth)), "invalid": float(wrong)}
        return Outcome(answer=secret if won else said, signals=signals, turn_rewards=tuple(worth))

    def demonstrate(self, prompt: Prompt, turn: int, messages: Sequence[Message]) -> str:
        """The middle one of the secrets that are still possible: bisection, where numbers are guessed."""
        secret, left = self._secret(prompt), self.secrets
        for message in messages:
            if message["role"] == "assistant" and (guess := self.read(str(message["content"]))) is not None:
                left = self.consistent(left, guess, secret)
        return left[(len(left) - 1) // 2] if left else secret

    def read(self, text: str) -> str | None:
        """The guess in a reply: the last that is one; of numbers, the last whole one, however it is written."""
        if isinstance(self.section, NumberGame):
            values = (value(number) for number in numbers(text))
            found = [str(each.numerator) for each in values if each is not None and each.denominator == 1]
        else:
            found = self.code.findall(text)
        return found[-1] if found else None

    def consistent(self, secrets: Sequence[str], guess: str, secret: str) -> list[str]:
        """The secrets that would have been told the same about a guess."""
        told = self.feedback(secret, guess)
        return [other for other in secrets if self.feedback(other, guess) == told]

    def is_secret(self, text: str | None) -> bool:
        """True for what can be guessed in this game."""
        return text is not None and self.read(text) == text and (not self.secrets or text in self.secrets)

    def _secret(self, prompt: Prompt) -> str:
        if prompt.reference is None or not self.is_secret(prompt.reference):
            raise RolloutError(f"prompt {prompt.id} has no secret of this game as its reference answer")
        return prompt.reference

    def _gain(self, before: Sequence[str], after: Sequence[str]) -> float:
        """The share of what there is to know that a guess has found out; over a game won, at most 1."""
        if len(self.secrets) < 2:
            return 0.0
        return math.log(len(before) / max(1, len(after))) / math.log(len(self.secrets))


def compared(section: NumberGame, secret: str, guess: str) -> str:
    """Higher, lower or right."""
    if guess == secret:
        return section.right
    return section.higher if int(secret) > int(guess) else section.lower


def matched(section: CodeGame, secret: str, guess: str) -> str:
    """How many characters are right, and how many are right elsewhere; or right."""
    if guess == secret:
        return section.right
    placed = sum(a == b for a, b in zip(secret, guess, strict=True))
    common = (Counter(secret) & Counter(guess)).total()
    return section.matched.replace("{placed}", str(placed)).replace("{misplaced}", str(common - placed))
