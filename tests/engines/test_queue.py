"""Lanes: requests one by one, answers together, and going on elsewhere with the same noise."""

import asyncio

import numpy as np
import pytest

from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.engines.queue import EngineQueue
from stretto.errors import DeadlineError, WorkerLost
from tiny import scratch_policy

POLICY = scratch_policy()


def request(key, length=12):
    """A request that never stops by itself."""
    tokens = np.array([1, 5, 6, 7], dtype=np.int64)
    return Request(key=key, tokens=tokens, max_new_tokens=length, stop=frozenset(), temperature=1.0)


class Engine:
    """An engine behind a lane; `rounds` counts the calls. It decodes a token a round if `slow`."""

    def __init__(self, slow=False):
        self.native = NativeEngine(POLICY, speculate=False)
        self.slow, self.rounds = slow, 0

    async def generate(self, new, unwanted, seconds):
        self.rounds += 1
        await asyncio.sleep(0)
        partial = self.native.abort(unwanted)
        self.native.submit(new)
        return partial + self.native.step(0.0 if self.slow else seconds)


async def answers(lane, requests):
    return await asyncio.gather(*(lane.ask(each) for each in requests))


def test_requests_that_come_together_are_answered_together():
    engine = Engine()
    found = asyncio.run(answers(EngineQueue(engine.generate), [request(1), request(2), request(3, length=5)]))
    assert [len(each.tokens) for each in found] == [12, 12, 5]
    assert engine.rounds == 2


class Soon:
    """A deadline that has passed as soon as somebody looks."""

    seconds = 0.0

    async def missed(self):
        return DeadlineError("generate has not answered")


def test_who_waits_too_long_is_told_though_rounds_go_on():
    async def asked():
        here, there = (EngineQueue(Engine(slow=True).generate, deadline=late) for late in (None, Soon()))
        first, second = (asyncio.ensure_future(here.ask(request(key))) for key in (7, 8))
        await asyncio.sleep(0.01)
        here.move([7], there)  # it is as old there as it was
        with pytest.raises(DeadlineError, match="has not answered"):
            await first
        return await second

    assert len(asyncio.run(asked()).tokens) == 12


@pytest.mark.parametrize("rounds", [1, 4, 9])
def test_what_moves_becomes_the_same_answer(rounds):
    async def moved():
        first, second = Engine(slow=True), Engine()
        here, there = EngineQueue(first.generate), EngineQueue(second.generate)
        asked = asyncio.ensure_future(here.ask(request(7)))
        while first.rounds < rounds:
            await asyncio.sleep(0)
        here.move([7], there)
        answer = await asked
        return answer, second.rounds

    (whole,) = asyncio.run(answers(EngineQueue(Engine().generate), [request(7)]))
    answer, elsewhere = asyncio.run(moved())
    assert elsewhere > 0
    assert answer.tokens.tolist() == whole.tokens.tolist()
    assert answer.logprobs == pytest.approx(whole.logprobs, abs=1e-12)
    assert answer.stop == "length"


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_what_moves_does_not_wait_for_what_its_worker_does_next(rounds):
    """A worker serves calls in order; here the next is over only once the answer has come from elsewhere."""

    async def moved():
        first, second, worker = Engine(slow=True), Engine(), asyncio.Lock()

        async def generate(*arguments):
            async with worker:
                return await first.generate(*arguments)

        async def train(answer):
            async with worker:
                await answer

        here, there = EngineQueue(generate), EngineQueue(second.generate)
        answer = asyncio.ensure_future(here.ask(request(7)))
        await asyncio.sleep(0)
        while first.rounds < rounds:
            await asyncio.sleep(0)
        here.move([7], there)
        await asyncio.wait_for(asyncio.ensure_future(train(answer)), timeout=20)
        assert not here.asked and not here.leaving and second.rounds
        return await answer

    (whole,) = asyncio.run(answers(EngineQueue(Engine().generate), [request(7)]))
    assert asyncio.run(moved()).tokens.tolist() == whole.tokens.tolist()


@pytest.mark.parametrize("rounds", [1, 4])
def test_what_is_on_its_way_when_its_worker_dies_begins_again_where_it_was_to_go(rounds):
    async def moved():
        first, second = Engine(slow=True), Engine()

        async def generate(new, unwanted, seconds):
            if unwanted:
                raise WorkerLost("localhost/cpu:0", "its process has died")
            return await first.generate(new, unwanted, seconds)

        here, there = EngineQueue(generate), EngineQueue(second.generate)
        asked = asyncio.ensure_future(here.ask(request(7)))
        while first.rounds < rounds:
            await asyncio.sleep(0)
        here.move([7], there)
        answer = await asked
        assert not there.coming and not here.leaving
        return answer

    (whole,) = asyncio.run(answers(EngineQueue(Engine().generate), [request(7)]))
    assert asyncio.run(moved()).tokens.tolist() == whole.tokens.tolist()


def test_what_is_given_up_on_its_way_leaves_nothing_behind_when_its_worker_dies():
    async def given_up():
        async def generate(new, unwanted, seconds):
            await asyncio.sleep(0)
            raise WorkerLost("localhost/cpu:0", "its process has died")

        here, there = EngineQueue(generate), EngineQueue(Engine().generate)
        asked = asyncio.ensure_future(here.ask(request(7)))
        await asyncio.sleep(0)
        here.new.clear()  # as if the worker had it
        here.move([7], there)
        asked.cancel()
        here.give_up([7])
        while here.handing or here.serving:
            await asyncio.sleep(0)
        return here.leaving or there.coming

    assert not asyncio.run(given_up())


@pytest.mark.parametrize("back", [False, True])
def test_what_is_moved_on_before_it_has_come_goes_straight_there(back):
    async def moved():
        first, second, third = Engine(slow=True), Engine(), Engine()
        here, there = EngineQueue(first.generate), EngineQueue(second.generate)
        last = here if back else EngineQueue(third.generate)
        asked = asyncio.ensure_future(here.ask(request(7)))
        while first.rounds < 3:
            await asyncio.sleep(0)
        here.move([7], there)
        there.move([7], last)
        answer = await asked
        assert not second.rounds
        assert third.rounds or back
        return answer

    (whole,) = asyncio.run(answers(EngineQueue(Engine().generate), [request(7)]))
    assert asyncio.run(moved()).tokens.tolist() == whole.tokens.tolist()


def test_what_nobody_waits_for_is_taken_out():
    async def given_up():
        engine = Engine(slow=True)
        lane = EngineQueue(engine.generate)
        asked = asyncio.ensure_future(lane.ask(request(7)))
        other = asyncio.ensure_future(lane.ask(request(8, length=3)))
        await asyncio.sleep(0.01)
        asked.cancel()
        lane.give_up([7])
        await other
        while lane.serving is not None:
            await asyncio.sleep(0)
        return engine

    engine = asyncio.run(given_up())
    assert engine.native.active == []


def test_a_death_reaches_everybody_who_waits():
    async def dies(new, unwanted, seconds):
        raise WorkerLost("localhost/cpu:1", "its process has died")

    async def both():
        lane = EngineQueue(dies)
        return await asyncio.gather(lane.ask(request(1)), lane.ask(request(2)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(both())] == [WorkerLost, WorkerLost]


def test_what_was_on_its_way_to_a_cell_that_died_may_be_asked_again_where_it_came_from():
    """It is given up there before its worker has let go of it, and has the same key when it begins again."""

    async def asked_again():
        async def dead(new, unwanted, seconds):
            raise WorkerLost("localhost/cpu:1", "its process has died")

        first = Engine(slow=True)
        here, there = EngineQueue(first.generate), EngineQueue(dead)
        asked = asyncio.ensure_future(here.ask(request(7)))
        while first.rounds < 3:
            await asyncio.sleep(0)
        here.move([7], there)
        asked.cancel()
        there.give_up([7])
        answer = await asyncio.wait_for(here.ask(request(7)), timeout=20)
        assert not here.leaving and not there.coming
        return answer

    (whole,) = asyncio.run(answers(EngineQueue(Engine().generate), [request(7)]))
    assert asyncio.run(asked_again()).tokens.tolist() == whole.tokens.tolist()


def test_the_answer_to_what_was_given_up_is_nobody_elses():
    async def asked_again():
        engine, begun = Engine(), asyncio.Event()

        async def generate(*arguments):
            await begun.wait()
            return await engine.generate(*arguments)

        lane = EngineQueue(generate)
        asked = asyncio.ensure_future(lane.ask(request(7, length=3)))
        await asyncio.sleep(0.01)
        asked.cancel()
        lane.give_up([7])
        again = asyncio.ensure_future(lane.ask(request(7, length=5)))
        await asyncio.sleep(0.01)
        begun.set()
        return await asyncio.wait_for(again, timeout=20)

    assert len(asyncio.run(asked_again()).tokens) == 5


def test_what_a_worker_had_not_heard_of_when_it_died_is_sent_to_the_next_once():
    async def asked_again():
        sent, died = [], asyncio.Event()

        async def generate(new, unwanted, seconds):
            if not died.is_set():
                await died.wait()
                raise WorkerLost("localhost/cpu:0", "its process has died")
            sent.extend(each.key for each in new)
            return await engine.generate(new, unwanted, seconds)

        engine, lane = Engine(), EngineQueue(generate)
        first = asyncio.ensure_future(lane.ask(request(1)))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(lane.ask(request(2)))
        await asyncio.sleep(0.01)
        died.set()
        await asyncio.gather(first, second, return_exceptions=True)
        await lane.ask(request(2))
        return sent

    assert asyncio.run(asked_again()) == [2]
