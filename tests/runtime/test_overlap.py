"""On one device nobody waits for who is elsewhere: verdicts come in and tools are waited for while others decode."""

import asyncio
from collections import defaultdict
from dataclasses import replace
from itertools import count

from running import recipe_in
from stretto.environments.single_turn import run as single_turn
from stretto.runtime.build import build_runtime
from stretto.runtime.executor import StepExecutor
from stretto.runtime.plans import make_plan
from stretto.runtime.schedule import run_step
from stretto.runtime.spans import REWARD_WORKERS, Clock

ANSWERS = 3 * 4
"""Of the step."""


def test_answers_are_judged_and_tools_are_waited_for_while_others_are_generated(tmp_path, monkeypatch):
    """The tool of each attempt answers only when the attempt before has its verdict: a step that judges nothing before
    a group's last answer, or an engine that waits until everybody asks, would never come there."""
    recipe = recipe_in(tmp_path, environment__deadline=5.0)
    told, attempts, verdicts, judge = [], count(), count(), StepExecutor.judge
    judged = defaultdict(asyncio.Event)

    async def noted(executor, item):
        await judge(executor, item)
        told.append("judged")
        judged[next(verdicts)].set()

    async def with_tool(prompt, model):
        if attempt := next(attempts):
            await judged[attempt - 1].wait()
        outcome = await single_turn(prompt, model)
        told.append("answered")
        return outcome

    async def step():
        parts = await build_runtime(recipe, plan=make_plan(recipe), root=tmp_path, folder=tmp_path, note=print)
        try:
            clock = Clock(devices=parts.devices)
            clock.begin()
            taken = await run_step(replace(parts, environment=with_tool), clock, step=1)
            assert not taken.batch.scored.failed
            return clock.spans
        finally:
            await parts.close()

    monkeypatch.setattr(StepExecutor, "judge", noted)
    spans = asyncio.run(step())
    assert told == ["answered", "judged"] * ANSWERS
    (generate,) = [span for span in spans if span.stage == "generate"]
    end = generate.start + generate.seconds
    within = [generate.start < s.start and s.start + s.seconds < end for s in spans if s.cell == REWARD_WORKERS]
    assert within == [True] * (ANSWERS - 1) + [False], "the timeline shows it"
