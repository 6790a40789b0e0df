"""Which team of a lane decodes a request: the one that has the least to do, whole prompts together where that pays."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stretto.engines.base import Completion, Request


@dataclass(slots=True)
class _Team:
    """What a team is busy with."""

    tokens: int = 0
    """Most tokens that it has still to decode."""
    contexts: Counter[bytes] = field(default_factory=Counter)
    """How many of its requests have each context."""


class TeamShares:
    """Requests of a lane, divided among its teams."""

    def __init__(self, teams: int) -> None:
        self.teams = [_Team() for _ in range(teams)]
        # Key -> who has it. The same request may be asked again before its first answer is there.
        self.asked: dict[int, deque[tuple[_Team, Request]]] = defaultdict(deque)

    def parts(self, new: Sequence[Request]) -> list[Sequence[Request]]:
        """Those of each team. A context that stands with a team already costs it nothing, another all its tokens."""
        if len(self.teams) == 1:
            return [new]
        parts: list[list[Request]] = [[] for _ in self.teams]
        for request in new:
            context = request.tokens.tobytes()
            costs = [team.tokens + (0 if team.contexts[context] else len(request.tokens)) for team in self.teams]
            chosen = costs.index(min(costs))
            self.teams[chosen].tokens += request.max_new_tokens
            self.teams[chosen].contexts[context] += 1
            self.asked[request.key].append((self.teams[chosen], request))
            parts[chosen].append(request)
        return list(parts)

    def done(self, completions: Iterable[Completion]) -> None:
        """These are over, to their end or not."""
        for completion in completions:
            if completion.key in self.asked:
                team, request = self.asked[completion.key].popleft()
                team.tokens -= request.max_new_tokens
                team.contexts.subtract([request.tokens.tobytes()])
                team.contexts = +team.contexts  # those of nobody are forgotten
                if not self.asked[completion.key]:
                    del self.asked[completion.key]

    def clear(self) -> None:
        """Nothing is asked any more."""
        self.asked.clear()
        for team in self.teams:
            team.tokens = 0
            team.contexts.clear()
