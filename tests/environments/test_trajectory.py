"""Environments run against an engine all at once; each one's troubles are its own, and the engine is left empty."""

import asyncio
import gc
import re
import time
from collections import Counter

import numpy as np
import pytest

from alone import ROUNDING
from stretto.engines.native.engine import NativeEngine
from stretto.engines.queue import EngineQueue
from stretto.engines.scripted import ScriptedEngine
from stretto.environments import single_turn
from stretto.environments.chat import Sampling
from stretto.environments.render import Renderer
from stretto.environments.trajectory import EnvironmentBudget, RolloutStart, run_trajectory
from stretto.errors import EngineError, RolloutError
from stretto.models.scratch import character_tokenizer
from stretto.types import Outcome, Prompt

STOP = 0
ZERO = 7


def user(text):
    return {"role": "user", "content": text}


class Panic(BaseException):
    """As libraries in Rust raise."""


class Mute(Exception):
    """Has no message that could be shown."""

    def __str__(self):
        raise ValueError


def launches(count, *, attempts=1):
    return [
        RolloutStart(prompt=Prompt(id=f"p{index}", messages=(user(str(index)),)), visit=0, attempt=attempt)
        for index in range(count)
        for attempt in range(attempts)
    ]


async def collected(asked, engine, *, environment, renderer, outside=60.0, context=256, lanes=None, addresses=None):
    """The trajectories of launches that run at once on an engine."""

    async def generate(new, unwanted, seconds):
        partial = engine.abort(unwanted) if unwanted else []
        engine.submit(new)
        return partial + engine.step(seconds)

    lane = EngineQueue(generate, together=True)
    if lanes is not None:
        lanes.append(lane)

    async def one(launch):
        with lane.trajectory():
            return await run_trajectory(
                launch,
                model=lane,
                environment=environment,
                renderer=renderer,
                sampling=Sampling(seed=0, temperature=1.0, max_new_tokens=8, context=context),
                outside=EnvironmentBudget(outside, lane.whereabouts),
                addresses=addresses,
            )

    return list(await asyncio.gather(*map(one, asked)))


@pytest.fixture
def collect(tokenizer):
    """Runs an environment for launches on an engine and returns the trajectories."""

    def run(asked, environment=single_turn.run, *, engine=None, **rest):
        engine = engine or ScriptedEngine(lambda request: [ZERO, STOP])
        renderer = Renderer(tokenizer, stop=frozenset({STOP}))
        return asyncio.run(collected(asked, engine, environment=environment, renderer=renderer, **rest))

    return run


def answered(trajectories):
    return [trajectory.outcome and trajectory.outcome.answer for trajectory in trajectories]


def test_trajectories_come_in_launch_order_whatever_ends_first(collect):
    async def uneven(prompt, model):
        for _ in range(5 - int(prompt.id[1:])):
            reply = await model.chat(prompt.messages)
        return Outcome(answer=f"{prompt.id} {reply.text}")

    asked = launches(4, attempts=2)
    trajectories = collect(asked, uneven)
    assert [(t.prompt.id, t.attempt) for t in trajectories] == [(a.prompt.id, a.attempt) for a in asked]
    assert answered(trajectories) == [f"{launch.prompt.id} 0" for launch in asked]
    assert [len(t.conversations) for t in trajectories] == [5, 5, 4, 4, 3, 3, 2, 2]
    assert all(t.failure is None for t in trajectories)


def test_no_launches_are_no_trajectories(collect):
    assert collect([]) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("by zero"), "environment: ZeroDivisionError: by zero"),
        (RolloutError("no room"), "environment: no room"),
        (TimeoutError("its own"), "environment: TimeoutError: its own"),
        (asyncio.CancelledError("lost"), "environment: CancelledError: lost"),
        (KeyError("x"), "environment: KeyError: 'x'"),
        (SystemExit(2), "environment: SystemExit: 2"),
        (GeneratorExit("mine"), "environment: GeneratorExit: mine"),
        (Panic("a library"), "environment: Panic: a library"),
        (Mute(), "environment: Mute: (its message could not be made)"),
        (ValueError("x" * 5000), f"environment: ValueError: {'x' * 2000} (the other 3,000 are cut)"),
        (ExceptionGroup("two", [KeyError("x")]), "environment: ExceptionGroup: two (1 sub-exception): KeyError: 'x'"),
    ],
)
def test_what_an_environment_raises_costs_its_own_trajectory(collect, error, message):
    async def fragile(prompt, model):
        reply = await model.chat(prompt.messages)
        if prompt.id == "p1":
            raise error
        return Outcome(answer=reply.text)

    trajectories = collect(launches(3), fragile)
    assert [t.failure and t.failure.partition("\n")[0] for t in trajectories] == [None, message, None]
    if not isinstance(error, asyncio.CancelledError):
        assert f'File "{__file__}", line {fragile.__code__.co_firstlineno + 3}, in fragile' in trajectories[1].failure
        assert "raise error" in trajectories[1].failure
    assert answered(trajectories) == ["0", None, "0"]
    assert len(trajectories[1].conversations) == 1, "what the model said before is kept"


def test_an_environment_that_cancels_its_own_task_costs_its_own_trajectory(collect):
    async def scoped(prompt, model):
        reply = await model.chat(prompt.messages)
        if prompt.id == "p1":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        return Outcome(answer=reply.text)

    trajectories = collect(launches(3), scoped)
    assert answered(trajectories) == ["0", None, "0"]
    assert trajectories[1].failure == "environment: CancelledError: it canceled the task that it runs in"


def test_the_cause_in_a_task_group_of_an_environment_is_shown_with_its_line(collect):
    async def grouped(prompt, model):
        async def inner():
            raise KeyError("no such room")

        await model.chat(prompt.messages)
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())

    (trajectory,) = collect(launches(1), grouped)
    assert "KeyError: 'no such room'" in trajectory.failure
    assert "in inner" in trajectory.failure


def test_a_background_task_that_raises_is_warned_of_once_with_its_line(collect):
    async def careless(prompt, model):
        async def later():
            raise KeyError(f"lost {prompt.id}")

        asyncio.get_running_loop().create_task(later())
        return Outcome(answer=(await model.chat(prompt.messages)).text)

    with pytest.warns(UserWarning, match="a background task failed.*KeyError.*lost") as told:
        assert answered(collect(launches(4), careless)) == ["0"] * 4
        gc.collect()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda prompt, model: model.chat({"role": "user", "content": "1"}), "messages: .* no list of messages"),
        (lambda prompt, model: model.chat(prompt), "messages: .* is a Prompt"),
        (lambda prompt, model: model.chat(["1"]), r"messages\[0\]: '1' is a str, no message"),
        (lambda prompt, model: model.chat([]), "messages: the list is empty"),
        (lambda prompt, model: model.chat([{"content": "1"}]), r"messages\[0\]: .* has no role"),
        (lambda prompt, model: model.chat([user(None)]), r"messages\[0\]: .* has no content"),
        (lambda prompt, model: model.chat("1", stop=[5]), "stop: 5 cannot end a reply"),
        (lambda prompt, model: model.chat("1", stop=5), "stop: 5 cannot end a reply"),
        (lambda prompt, model: model.chat("1", stop=[""]), "stop: '' cannot end a reply"),
        (lambda prompt, model: model.chat("1", max_new_tokens=1.5), "max_new_tokens: 1.5 is no limit"),
        (lambda prompt, model: model.chat("1", max_new_tokens="8"), "max_new_tokens: '8' is no limit"),
        (lambda prompt, model: model.chat("1", tools=[print]), "tools: .* no schema of a tool"),
    ],
)
def test_a_call_of_the_model_with_something_else_is_refused_with_a_fix(collect, call, words):
    (trajectory,) = collect(launches(1), call)
    assert re.match(f"environment: ValueError: {words}.*\n    fix: ", trajectory.failure), trajectory.failure


def test_a_text_is_one_message_of_the_users(collect):
    async def short(prompt, model):
        return Outcome(answer=(await model.chat("1+1")).text)

    async def long(prompt, model):
        return Outcome(answer=(await model.chat([user("1+1")])).text)

    (one,), (other,) = (collect(launches(1), environment) for environment in (short, long))
    assert one.conversations[0].tokens.tolist() == other.conversations[0].tokens.tolist()


def test_an_environment_that_never_asks_the_model_has_failed(collect):
    async def silent(prompt, model):
        return Outcome(answer="?")

    (trajectory,) = collect(launches(1), silent)
    assert "without calling the model" in trajectory.failure


def test_seconds_outside_the_engine_count_against_the_environment(collect):
    async def slow(prompt, model):
        reply = await model.chat(prompt.messages)
        if prompt.id == "p0":
            await asyncio.sleep(60)
        return Outcome(answer=reply.text)

    trajectories = collect(launches(2), slow, outside=0.2)
    assert [t.failure for t in trajectories] == ["environment: not finished within 0.2 s outside the engine", None]


class Sleepy(ScriptedEngine):
    """Takes its time over every answer."""

    seconds = 0.06

    def step(self, budget_seconds):
        time.sleep(self.seconds)
        return super().step(budget_seconds)


@pytest.mark.parametrize("parallel", [1, 3])
def test_seconds_inside_the_engine_do_not(collect, parallel):
    async def chatty(prompt, model):
        for turn in range(3):
            await asyncio.gather(*(model.chat([user(f"{turn}{index}")]) for index in range(parallel)))
            await asyncio.sleep(0.005)
        return Outcome(answer="done")

    engine = Sleepy(lambda request: [STOP])
    engine.seconds = 0.6 / (3 * parallel)
    (trajectory,) = collect(launches(1), chatty, engine=engine, outside=0.5)
    assert (trajectory.failure, len(trajectory.conversations)) == (None, 3 * parallel)


def test_a_deadline_passes_even_between_calls_that_never_end_together(collect):
    async def stuck(prompt, model):
        async with asyncio.TaskGroup() as group:
            group.create_task(model.chat(prompt.messages))
            group.create_task(asyncio.sleep(60))
        return Outcome(answer="never")

    (trajectory,) = collect(launches(1), stuck, outside=0.1)
    assert trajectory.failure == "environment: not finished within 0.1 s outside the engine"


class Recording(ScriptedEngine):
    """Notes which requests waited together whenever it is asked for a step."""

    def __init__(self, script):
        super().__init__(script)
        self.together = []

    def step(self, budget_seconds):
        self.together.append(len(self.waiting))
        return super().step(budget_seconds)


def test_the_engine_is_stepped_when_every_environment_waits_for_it(collect):
    async def twice(prompt, model):
        reply = await model.chat(prompt.messages)
        for _ in range(int(prompt.id[1:])):
            await asyncio.sleep(0)
        return Outcome(answer=(await model.chat([*prompt.messages, reply, user("1")])).text)

    engine = Recording(lambda request: [STOP])
    collect(launches(4), twice, engine=engine)
    assert engine.together == [4, 4, 4, 4, 4, 3, 2, 1]


def test_an_engine_that_fails_ends_the_round(collect):
    class Broken(ScriptedEngine):
        def step(self, budget_seconds):
            raise EngineError("it broke")

    with pytest.raises(EngineError, match="it broke"):
        collect(launches(2), engine=Broken(lambda request: [STOP]))


def test_a_tool_that_sleeps_does_not_stop_the_engine(collect):
    async def uses_a_tool(prompt, model):
        reply = await model.chat(prompt.messages)
        if prompt.id == "p0":
            await asyncio.sleep(0.1)
            return Outcome(answer=str(len(engine.together)))
        for turn in range(4):
            reply = await model.chat([*prompt.messages, reply, user(str(turn))])
        return Outcome(answer=reply.text)

    engine = Recording(lambda request: [STOP])
    first, _ = collect(launches(2), uses_a_tool, engine=engine)
    assert len(engine.together) == 6
    assert first.outcome.answer == "6", "the other had been answered five times when the tool was done"


def test_a_lane_that_is_cancelled_leaves_nothing_behind(tokenizer, plain_policy):
    async def run(engine):
        lanes, renderer = [], Renderer(tokenizer, stop=frozenset())
        asked = collected(launches(4), engine, environment=single_turn.run, renderer=renderer, lanes=lanes)
        task = asyncio.create_task(asked)
        while not engine.active:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while lanes[0].serving:
            await asyncio.sleep(0)
        return lanes[0]

    class Slow(NativeEngine):
        def step(self, budget_seconds):
            return super().step(0.0)

    engine = Slow(plain_policy, slots=3)
    lane = asyncio.run(run(engine))
    assert not engine.active
    assert not engine.waiting
    assert not lane.asked and not lane.running and not lane.whereabouts.waiting and not lane.whereabouts.due
    assert engine.step(1.0) == []


@pytest.mark.parametrize("how", ["a limit of its own", "a sibling's failure"])
def test_an_environment_may_give_up_a_call_and_go_on(collect, how):
    async def impatient(prompt, model):
        if prompt.id == "p1":
            try:
                if how == "a limit of its own":
                    await asyncio.wait_for(model.chat([user("1+1+1")]), 0.01)
                else:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(model.chat([user("1+1+1")]))
                        group.create_task(model.chat([user("1" * 300)]))
            except (TimeoutError, ExceptionGroup):
                given_up.append(prompt.id)
        return Outcome(answer=(await model.chat(prompt.messages)).text)

    given_up, engine = [], Sleepy(lambda request: [ZERO, STOP])
    trajectories = collect(launches(3), impatient, engine=engine)
    assert given_up == ["p1"]
    assert answered(trajectories) == ["0", "0", "0"]
    assert [len(trajectory.conversations) for trajectory in trajectories] == [1, 1, 1]
    assert not engine.waiting


def test_a_call_that_an_environment_left_behind_is_not_generated(collect):
    async def careless(prompt, model):
        messages = list(prompt.messages)
        if prompt.id == "p1":
            begun.append(asyncio.get_running_loop().create_task(model.chat([user("1+1+1")])))  # or nobody knows it
            begun[-1].add_done_callback(left.append)
        for _ in range(4 - int(prompt.id[1:]) * 3):
            messages += [await model.chat(messages), user("1")]
        return Outcome(answer="done")

    class ShortestFirst(ScriptedEngine):
        def step(self, budget_seconds):
            self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda request: len(request.tokens)))
            served.extend(list(self.waiting)[:1])
            return super().step(budget_seconds)

    begun, left, served = [], [], []
    trajectories = collect(launches(2), careless, engine=ShortestFirst(lambda request: [ZERO, STOP]))
    assert answered(trajectories) == ["done", "done"]
    assert [task.cancelled() for task in left] == [True]
    assert max(len(request.tokens) for request in served) > 7
    assert not any(request.tokens.tolist()[1:6] == [8, 6, 8, 6, 8] for request in served), "1+1+1 was answered"


def test_the_same_launches_draw_the_same_whatever_else_is_launched(collect, plain_policy):
    def answers(asked, **options):
        trajectories = collect(asked, engine=NativeEngine(plain_policy, **options))
        return {(t.prompt.id, t.attempt): t.conversations[0].tokens.tolist() for t in trajectories}

    everything = answers(launches(5, attempts=3))
    assert answers(launches(2, attempts=3)).items() <= everything.items()
    assert answers(launches(5, attempts=3)[::-1], slots=2) == everything
    assert max(Counter(map(tuple, everything.values())).values()) == 1, "two attempts drew the same"


def test_many_turns_on_the_native_engine_give_what_one_trajectory_alone_gives(collect, plain_policy):
    async def talks(prompt, model):
        messages = list(prompt.messages)
        for turn in range(3):
            messages += [await model.chat(messages), user(f"{turn}+")]
        return Outcome(answer=messages[-2].text)

    together = collect(launches(4, attempts=2), talks, engine=NativeEngine(plain_policy))
    for launch, trajectory in zip(launches(4, attempts=2), together, strict=True):
        (alone,) = collect([launch], talks, engine=NativeEngine(plain_policy))
        assert trajectory.failure is None
        assert len(trajectory.conversations) == len(alone.conversations)
        for one, other in zip(trajectory.conversations, alone.conversations, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=ROUNDING)


def test_a_conversation_that_fills_the_context_is_judged_as_it_is(collect):
    """36 trajectories of three turns: the environment ends each of them, with what the model has said."""

    async def three(prompt, model):
        messages, turns = list(prompt.messages), 0
        for _ in range(3):
            reply = await model.chat(messages)
            turns += bool(reply.tokens)
            messages += [reply, user("again")]
        return Outcome(answer=messages[-2]["content"], signals={"turns": float(turns)})

    wordy = ScriptedEngine(lambda request: [ZERO] * 8)
    trajectories = collect(launches(12, attempts=3), three, engine=wordy, context=20)
    assert [t.failure for t in trajectories] == [None] * 36
    assert {t.outcome.signals["turns"] for t in trajectories} == {1.0, 2.0}, "the second is cut off, or has no room"
    assert all(t.conversations[-1].stop == "length" and t.full for t in trajectories)
    assert max(len(c.tokens) for t in trajectories for c in t.conversations) <= 20


def test_what_fills_the_context_costs_no_other_trajectory_its_room(collect):
    async def once_or_thrice(prompt, model):
        messages = list(prompt.messages)
        for _ in range(3 if prompt.id == "p0" else 1):
            reply = await model.chat(messages)
            messages += [reply, user("again")]
        return Outcome(answer=reply.text)

    trajectories = collect(launches(3), once_or_thrice, engine=ScriptedEngine(lambda r: [ZERO] * 5), context=14)
    assert answered(trajectories) == ["", "00000", "00000"]
    assert [t.full for t in trajectories] == [2, 0, 0]


def test_a_prompt_that_does_not_fit_costs_its_own_trajectory(collect):
    asked = [RolloutStart(prompt=Prompt(id=f"p{n}", messages=(user("1" * n),)), visit=0, attempt=0) for n in (3, 30)]
    trajectories = collect(asked, context=14)
    assert trajectories[0].failure is None
    assert "a conversation of 32 tokens leaves no room in a context of 14" in trajectories[1].failure


@pytest.mark.parametrize(("again", "rewritten"), [(False, 0), (True, 1)])
def test_a_conversation_that_the_template_would_have_rewritten_is_counted_in_its_trajectory(again, rewritten):
    class Rewriting(Renderer):
        def delta(self, *given, **named):
            return None

    async def talks(prompt, model):
        reply = await model.chat(prompt.messages)
        if again:
            await model.chat([*prompt.messages, reply, user("2")])
        return Outcome(answer="")

    renderer = Rewriting(character_tokenizer("0123456789"), stop=frozenset({STOP}))
    engine = ScriptedEngine(lambda request: [ZERO, STOP])
    (trajectory,) = asyncio.run(collected(launches(1), engine, environment=talks, renderer=renderer))
    assert (trajectory.rewritten, len(trajectory.conversations), trajectory.failure) == (rewritten, 1 + again, None)
