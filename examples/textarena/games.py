"""Games of TextArena for one player, as a taskset of verifiers: any that needs no list of words from the network.

A task is a game with a seed. How it is played is verifiers' `TextArenaEnv`: it steps the game in this process, answers
each move with what the game says, and records the game's score as the reward `game_reward`.
"""

import random
from collections.abc import Iterator
from itertools import count

import textarena
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena import TextArenaData, TextArenaEnv, TextArenaTask


class GamesConfig(vf.TasksetConfig):
    """What `task.source.config` can say."""

    game: str = "GuessTheNumber-v0"


class Games(vf.Taskset[TextArenaTask, GamesConfig]):
    """Games without end, one a seed."""

    INFINITE = True

    def load(self) -> Iterator[TextArenaTask]:
        """Opens each game to see what it says first."""
        for seed in count():
            random.seed(seed)  # which textarena draws from
            game = textarena.make(env_id=self.config.game)
            game.reset(num_players=1)
            opening, info = str(game.get_observation()[1]), {"game": self.config.game, "seed": seed}
            name = f"{self.config.game}#{seed}"
            yield TextArenaTask(TextArenaData(name=name, prompt=opening, info=info), self.config.task)


__all__ = ["Games", "TextArenaEnv"]
