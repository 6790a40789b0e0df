"""One step of lag: crews in threads against a plain sequence of generating, then training on what was made before."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from crewed import STEPS, distance, saved
from running import recipe_in
from sequential import Sequential
from stretto.errors import StaleSampleError
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime.build import build_runtime
from stretto.runtime.evaluate import evaluate
from stretto.runtime.metrics import lag
from stretto.runtime.plans import make_plan
from stretto.runtime.schedule import run_step
from stretto.runtime.spans import Clock
from stretto.runtime.stale_batch import BatchBuffer, BufferedBatch
from stretto.storage.checkpoint import Checkpoints
from stretto.types import trajectory_key
from stretto.workers.launchers.inprocess import ThreadLauncher

LAG = {"staleness": 1, "strategy": "separate", "cluster": "2xcpu"}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}


def recipe_with(folder, **changes):
    return recipe_in(folder, model__dtype="float64", placement=LAG, **changes)


async def one_after_the_other(recipe, folder):
    """Weights and reports where batch n + 1 is generated with the weights that batch n is trained on."""
    plain, reports = plain_of(recipe, folder), []
    try:
        samples = (await plain.sampled()).samples
        for step in range(1, STEPS + 1):
            following = (await plain.sampled()).samples if step < STEPS else ()
            # What the weights that sampled it say of a batch, which is trained on once they have moved.
            old = plain.worker.score("policy", [sample.conversation for sample in following])
            reports.append(plain.learn(samples, step=step))
            samples = [replace(sample, old=its) for sample, its in zip(following, old, strict=True)]
        return plain.weights(), reports
    finally:
        await plain.close()


def plain_of(recipe, folder):
    """The plain step of a recipe whose trainer may lag."""
    on_one = recipe.model_copy(update={"placement": recipe.placement.model_validate({})})
    return Sequential(recipe, folder, plan=make_plan(on_one))


async def crew_of(recipe, folder, devices=2):
    names = tuple(f"localhost/cpu:{index}" for index in range(devices))
    plan = plan_of(recipe.placement, roles=roles_of(recipe), devices=names)
    return await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=ThreadLauncher())


async def some(parts, steps):
    """What some steps took, and the workers' weights after them."""
    taken = []
    for step in steps:
        clock = Clock(devices=parts.devices)
        clock.begin()
        taken.append(await run_step(parts, clock, step=step))
    return taken, (await saved(parts.worker_group, parts.worker_group.files.draft.parent))["optimizer"]["masters"]


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (2, {"algorithm__kl": {"coef": 0.1, "estimator": "k2"}}),
        pytest.param(3, {"algorithm": {"name": "dapo"}}, marks=pytest.mark.slow),
        (4, {"algorithm": {"name": "reinforce_pp", "clip": (0.01, 0.01)}}),
        # A seed with contrast in the first groups: where there is none, an update follows from rounding alone.
        (
            2,
            {
                "seed": 6,
                "model__adapter": LORA,
                "algorithm": {"clip": (0.01, 0.01), "kl": {"coef": 0.1, "where": "reward"}},
            },
        ),
        pytest.param(2, {"algorithm": {"name": "gspo"}}, marks=pytest.mark.slow),
    ],
    ids=["grpo", "dapo", "reinforce_pp", "lora", "gspo"],
)
def test_a_lagging_crew_ends_with_the_weights_of_the_plain_sequence(devices, changes, tmp_path):
    """The learning rate is so high that the ratio to the weights that sampled leaves the clip range."""
    recipe = recipe_with(tmp_path, optimizer__lr=0.02, **changes)
    weights, reports = asyncio.run(one_after_the_other(recipe, tmp_path))

    async def crewed():
        parts = await crew_of(recipe, tmp_path, devices)
        try:
            await parts.restored()
            return await some(parts, range(1, STEPS + 1))
        finally:
            await parts.close()

    taken, masters = asyncio.run(crewed())
    # A young adapter has gradients that are 0 but for rounding, and Adam divides them by their own size.
    young = "model__adapter" in changes
    assert distance(weights, masters) < (1e-7 if young else 1e-10)
    # Where it has not left its reference, the KL in the reward is rounding too, and with it whether a token counts as
    # clipped.
    for name in ("loss", "grad_norm", "ess", "tokens/trained", *(() if young else ("clip/share",))):
        found, plain = [each.report[name] for each in taken], [report[name] for report in reports]
        assert found == pytest.approx(plain, rel=1e-6 if young else 1e-8, abs=1e-12)
    clipped = [each.report["clip/share"] for each in taken]
    assert clipped[0] == 0 < max(clipped[1:]), "the first batch is trained on by the weights that sampled it"
    assert max(each.report["kl/engine_trainer"] for each in taken) < 1e-15, "the lag is in the ratio alone"


def test_every_sample_says_which_weights_made_it_and_an_evaluation_asks_the_newest(tmp_path):
    recipe = recipe_with(tmp_path)

    async def run():
        parts = await crew_of(recipe, tmp_path)
        try:
            await parts.restored()
            asked = []
            lane = parts.worker_group.lanes["generate"]
            ask = lane.ask

            async def noting(request):
                completion = await ask(request)
                asked.append(completion.version)
                return completion

            lane.ask = noting
            taken, _ = await some(parts, range(1, STEPS))
            asked.clear()
            await evaluate(parts, parts.heldout, pass_k=1)
            return taken, set(asked), parts
        finally:
            await parts.close()

    taken, asked, parts = asyncio.run(run())
    versions = [{sample.conversation.version for sample in each.batch.samples} for each in taken]
    assert versions == [{0}, {0}]  # trained on by versions 0 and 1
    assert [lag(each.batch, version) for version, each in enumerate(taken, start=1)] == [0, 1]
    assert {t.conversations[0].version for g in parts.ahead.waiting.batch.accepted for t in g.trajectories} == {1}
    assert asked == {STEPS - 1}


def test_a_run_goes_on_with_what_it_had_sampled_ahead(tmp_path):
    recipe = recipe_with(tmp_path, run__steps=5)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=None)

    async def whole():
        parts = await crew_of(recipe, tmp_path)
        try:
            await parts.restored()
            before, _ = await some(parts, [1, 2])
            assert before[1].report["grad_norm"] > 1e-3  # what samples from then on must not sample from the start
            await parts.fetch()
            model = parts.write_model
            checkpoints.save(
                2, parts=parts.stateful, written=parts.worker_group.files.names, write_model=model, metrics={}
            )
            return await some(parts, range(3, 6))
        finally:
            await parts.close()

    async def resumed():
        parts = await crew_of(recipe, tmp_path)
        try:
            checkpoints.restore(checkpoints.latest(), parts.stateful, written=parts.worker_group.files.names)
            await parts.restored(checkpoints.latest())
            return await some(parts, range(3, 6))
        finally:
            await parts.close()

    taken, weights = asyncio.run(whole())
    again, others = asyncio.run(resumed())
    assert distance(weights, others) < 1e-10
    assert all(each.report["grad_norm"] > 1e-3 for each in taken)
    assert [each.batch.launched for each in again] == [each.batch.launched for each in taken]
    for one, other in zip(taken, again, strict=True):
        assert [s.key for s in one.batch.samples] == [s.key for s in other.batch.samples]
        for mine, theirs in zip(one.batch.samples, other.batch.samples, strict=True):
            assert np.array_equal(mine.conversation.tokens, theirs.conversation.tokens)
            assert np.allclose(mine.conversation.logprobs, theirs.conversation.logprobs, rtol=0, atol=1e-10)
    first = checkpoints.latest() / "state" / "ahead.json"
    assert json.loads(first.read_text())["batch"]["old"], "what the weights that sampled it said of the batch is kept"


def test_without_lag_what_was_sampled_ahead_is_asked_anew(tmp_path):
    async def sampled():
        plain = Sequential(recipe_in(tmp_path), tmp_path)
        try:
            cursor = plain.prompts.state()
            return plain, cursor, BufferedBatch(batch=await plain.sampled(), cursor=cursor)
        finally:
            await plain.close()

    parts, cursor, waiting = asyncio.run(sampled())
    before = BatchBuffer(parts.prompts, keeps=True)
    before.waiting = waiting
    key = (*trajectory_key(waiting.batch.accepted[0].trajectories[0]), 0)
    before.waiting = replace(waiting, batch=replace(waiting.batch, old={key: np.array([-0.5, -0.25])}))
    state, drawn = before.state(), parts.prompts.state()
    parts.ahead.restore(state)
    assert parts.ahead.waiting is None
    assert parts.prompts.state() == cursor != drawn
    lagging = BatchBuffer(parts.prompts, keeps=True)
    lagging.restore(state)
    found = lagging.waiting.batch
    assert (found.launched, found.rounds, found.samples) == (waiting.batch.launched, waiting.batch.rounds, ())
    assert [group.rewards for group in found.accepted] == [group.rewards for group in waiting.batch.accepted]
    assert [group.prompt for group in found.accepted] == [group.prompt for group in waiting.batch.accepted]
    assert {key: numbers.tolist() for key, numbers in found.old.items()} == {key: [-0.5, -0.25]}
    del state["batch"]["old"]  # as checkpoints were before
    lagging.restore(state)
    assert lagging.waiting.batch.old == {}


def test_a_trainer_that_may_lag_one_version_refuses_two(tmp_path):
    async def run():
        plain = plain_of(recipe_with(tmp_path), tmp_path)
        try:
            batch, trainer = await plain.sampled(), plain.worker.trainer
            trainer.version = 1
            trainer.accumulate(batch.samples)
            trainer.version = 2
            with pytest.raises(StaleSampleError, match="not 2, nor from the 1 before"):
                trainer.accumulate(batch.samples)
        finally:
            await plain.close()

    asyncio.run(run())
