"""A taskset of verifiers in a few lines: sums, and a user who asks once more before the answer counts."""

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 3
    doubt: str = "1"


class Sums(vf.Taskset[Sum, SumsConfig]):
    INFINITE = True

    def load(self) -> Iterator[Sum]:
        number = 0
        while True:
            a, b = divmod(number, self.config.largest + 1)
            yield Sum(SumData(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)
            number += 1


class DoubtConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class Doubt(vf.Env[DoubtConfig]):
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as talk:
            if not (await talk.turn()).terminated:
                await talk.turn(self.taskset.config.doubt)


__all__ = ["Doubt", "Sums"]
