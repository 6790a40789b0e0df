"""Fifty mutated recipes that the checks accept run one step: whatever goes wrong in it is an error of ours to read."""

import itertools

import pytest

from recipe.test_mutations import mutants
from running import Quiet
from small_recipe import RIGHT
from stretto.api.recipes import PROBES
from stretto.checks.deep import deep_problems
from stretto.checks.recipe import check
from stretto.engines.scripted import ScriptedEngine
from stretto.errors import RecipeError, StrettoError
from stretto.recipe.load import parse_recipe
from stretto.recipe.resolve import resolve
from stretto.runtime import session

ACCEPTED = 50
LARGEST = 2_000
"""Trajectories and layer widths beyond which a mutant would take minutes and is left out."""


def quick(recipe):
    """The same recipe for one step, without a warm-up and without files for TensorBoard."""
    scratch = recipe.model.scratch.model_copy(update={"warmup_steps": 0})
    model = recipe.model.model_copy(update={"scratch": scratch})
    run = recipe.run.model_copy(update={"steps": 1})
    return recipe.model_copy(update={"model": model, "run": run, "log": ()})


def small(recipe):
    """True if one step of it takes no longer than a test may: a model of millions of weights does."""
    scratch = recipe.model.scratch
    if scratch is None:
        return False
    size = recipe.batch.prompts * recipe.batch.samples * recipe.engine.max_new_tokens + scratch.width * scratch.layers
    return max(size, recipe.evaluate.pass_k * recipe.evaluate.limit) <= LARGEST


def script(request):
    """Some digits, by the request's key, and an end of turn now and then."""
    return [(request.key >> shift) % 14 for shift in range(0, 48, 6)]


def accepted(folder):
    """Mutated recipes in which neither tier of checks finds anything, and that take no longer than a test may."""
    for data in mutants(RIGHT, range(10_000, 20_000)):
        try:
            recipe = resolve(parse_recipe(data))
        except RecipeError:
            continue
        if check(recipe, root=folder, probes=PROBES) or not small(recipe) or deep_problems(recipe, folder):
            continue
        yield quick(recipe)


@pytest.mark.slow
def test_accepted_mutants_run_a_step_or_say_why_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran, failed = 0, []
    for recipe in itertools.islice(accepted(tmp_path), ACCEPTED):
        try:
            run = session.start(
                recipe,
                name="mutant",
                root=tmp_path,
                progress=Quiet(),
                make_engine=lambda policy: ScriptedEngine(script, logprob=-2.6),
            )
            assert (run.folder / "metrics.jsonl").exists()
        except StrettoError as error:
            failed.append(str(error))
        ran += 1
    assert ran == ACCEPTED
    assert len(failed) < ACCEPTED / 4, failed
    assert all(text and "Traceback" not in text for text in failed)
