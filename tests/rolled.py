"""Trajectories that a real engine has sampled from a tiny model, in any environment."""

import asyncio

from stretto.engines.native.engine import NativeEngine
from stretto.engines.queue import EngineQueue
from stretto.environments.addresses import Addresses
from stretto.environments.chat import Sampling
from stretto.environments.render import Renderer
from stretto.environments.trajectory import EnvironmentBudget, RolloutStart, run_trajectory
from stretto.types import Group, Reward


def rolled(policy, environment, prompts, *, attempts=4, limit=6, temperature=1.0, served=False):
    """Every attempt at every prompt, in launch order; where it is `served`, the model has an address."""
    engine = NativeEngine(policy)

    async def generate(new, unwanted, seconds):
        engine.submit(new)
        return engine.abort(unwanted) + engine.step(seconds)

    async def run():
        lane = EngineQueue(generate)
        addresses = Addresses(vocabulary=len(policy.tokenizer)) if served else None

        async def one(prompt, attempt):
            with lane.trajectory():
                return await run_trajectory(
                    RolloutStart(prompt=prompt, visit=0, attempt=attempt),
                    model=lane,
                    environment=environment,
                    renderer=Renderer(policy.tokenizer, stop=policy.stop_tokens),
                    sampling=Sampling(seed=3, temperature=temperature, max_new_tokens=limit, context=policy.context),
                    outside=EnvironmentBudget(60.0, lane.whereabouts),
                    addresses=addresses,
                )

        try:
            return await asyncio.gather(*(one(prompt, attempt) for prompt in prompts for attempt in range(attempts)))
        finally:
            if addresses is not None:
                await addresses.close()

    return asyncio.run(run())


def grouped(trajectories):
    """Groups by prompt, with rewards that differ."""
    groups = []
    for prompt in dict.fromkeys(trajectory.prompt.id for trajectory in trajectories):
        mine = tuple(each for each in trajectories if each.prompt.id == prompt)
        rewards = tuple(Reward(value=float(i % 3), outcome=float(i % 3), parts={}) for i in range(len(mine)))
        groups.append(Group(prompt=mine[0].prompt, trajectories=mine, rewards=rewards))
    return tuple(groups)
