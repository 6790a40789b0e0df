"""Runs that learn from a teacher, alone and on cells of their own."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crewed import alone, distance, together
from running import assert_same_run, lines, recipe_in, resume, start
from sequential import Sequential
from stretto.checks.deep import deep_problems
from stretto.environments.render import Renderer
from stretto.errors import RecipeError, TrainingError
from stretto.models.quantised import QuantisedLinear
from stretto.recipe.describe import objective
from stretto.recipe.load import parse_recipe
from stretto.recipe.schema import TeacherModel
from stretto.report.health import health
from stretto.report.read_run import RunRecord
from stretto.report.samples_text import page
from stretto.runtime.questions import evaluate_run
from stretto.runtime.teacher_prompt import TeacherPrompt, shared_context
from stretto.types import Prompt
from tiny import conversation, naive_logprobs, scratch_policy


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The model of a run of a larger tiny model."""
    folder = tmp_path_factory.mktemp("teacher")
    return str(start(folder, run__steps=1, evaluate__every=0, model__scratch__width=32, seed=9).model)


@pytest.mark.parametrize(
    ("strategy", "algorithm", "changes"),
    [
        ("elastic", {"name": "distill", "top_k": 3}, {}),
        (
            "interleave",
            {"name": "distill", "reward_weight": 0.5},
            {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}},
        ),
        pytest.param("separate", {"name": "distill"}, {"batch__updates": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_strategy_ends_with_the_weights_of_one_device(strategy, algorithm, changes, teacher, tmp_path):
    changes = {"model__dtype": "float64", "optimizer__lr": 1e-4, "roles__teacher": {"name": teacher}, **changes}
    recipe = recipe_in(tmp_path, algorithm=algorithm, **changes)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    weights, crewed, metrics = asyncio.run(together(recipe, tmp_path, strategy))
    assert distance(single, weights) < 1e-10
    assert [each["loss"] for each in crewed] == pytest.approx([each["loss"] for each in reports], rel=1e-9)
    assert metrics["seconds/reference"] > 0


HINT = "{prompt} it is {reference}"


@pytest.mark.parametrize(
    "changes", [{}, {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}}], ids=["all", "lora"]
)
def test_a_policy_may_learn_from_itself_when_it_was_told_more(changes, tmp_path):
    """The teacher is the policy before training; at first only what it is asked lies between the two."""
    changes = {"model__dtype": "float64", "optimizer__lr": 1e-4, **changes}
    taught = {"name": "scratch", "prompt": HINT}
    recipe = recipe_in(tmp_path, algorithm={"name": "distill"}, roles__teacher=taught, **changes)
    assert "before training, which is asked roles.teacher.prompt" in objective(recipe)
    plain = Sequential(recipe, tmp_path)
    try:
        batch = asyncio.run(plain.sampled())
        policy = plain.worker.policy
        for trajectory in batch.accepted[0].trajectories:
            (talk,) = trajectory.conversations
            text = trajectory.prompt.messages[-1]["content"]
            told = [{"role": "user", "content": f"{text} it is {trajectory.prompt.reference}"}]
            opening = policy.tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
            answer = talk.tokens[talk.trained]
            asked = SimpleNamespace(
                tokens=np.array([*opening, *answer]), trained=np.arange(len(opening) + len(answer)) >= len(opening)
            )
            said = naive_logprobs(policy, asked, temperature=recipe.engine.temperature).detach().numpy()
            sample = next(
                each
                for each in batch.samples
                if each.key[2] == trajectory.attempt and each.key[0] == trajectory.prompt.id
            )
            assert sample.advantage == pytest.approx(said - sample.conversation.logprobs[talk.trained], abs=1e-9)
        single, _ = asyncio.run(alone(recipe, tmp_path))
    finally:
        asyncio.run(plain.close())
    weights, *_ = asyncio.run(together(recipe, tmp_path, "elastic"))
    assert distance(single, weights) < 1e-10


def test_an_adapter_is_no_teacher_not_even_as_its_base(tmp_path):
    adapter = {"kind": "lora", "rank": 4, "alpha": 8}
    folder = start(tmp_path, run__steps=1, evaluate__every=0, model__adapter=adapter).model
    taught = {"algorithm": {"name": "distill"}, "roles__teacher": {"name": str(folder)}}
    with pytest.raises(RecipeError, match=r"roles\.teacher\.name: .* is an adapter of .*\n.*`stretto merge`"):
        recipe_in(tmp_path, **taught)
    recipe = recipe_in(tmp_path, **taught | {"roles__teacher": {"name": "scratch", "prompt": "{prompt}"}})
    roles = recipe.roles.model_copy(update={"teacher": TeacherModel(name=str(folder))})  # it became one after the check
    with pytest.raises(RecipeError, match=r"roles\.teacher\.name: .*adapter"):
        Sequential(recipe.model_copy(update={"roles": roles}), tmp_path)


def test_a_teachers_prompt_that_cannot_be_asked_is_refused(teacher, tmp_path):
    distill, field = {"name": "distill"}, "roles.teacher.prompt"
    wrong = problems(tmp_path, algorithm=distill, roles__teacher={"name": teacher, "prompt": "{promt}"})
    assert "no column 'promt'" in wrong[field]
    elsewhere = {"kind": "game", "range": [0, 999]}
    wrong = problems(
        tmp_path, algorithm=distill, roles__teacher={"name": teacher, "prompt": HINT}, environment=elsewhere
    )
    assert "environment.kind is game" in wrong[field]
    tokenizer = scratch_policy().tokenizer
    long = TeacherPrompt("{prompt}" * 50, Renderer(tokenizer, stop=frozenset()), context=64)
    with pytest.raises(TrainingError, match=r"roles.teacher.prompt: prompt p1 and its answer have \d+ tokens"):
        long.asked(Prompt(id="p1", messages=({"role": "user", "content": "abc"},)), conversation([1, 2, 3, 4], [2, 3]))
    fits = TeacherPrompt("{prompt}{hint}", long.renderer, context=64)
    told = Prompt(id="p1", messages=({"role": "user", "content": "abc"},), tags={"hint": "de"})
    routed = replace(conversation([1, 2, 3, 4], [2, 3]), experts=np.zeros((4, 1, 1), dtype=np.int16))
    assert fits.asked(told, routed).experts is None, "its tokens are others"
    with pytest.raises(RecipeError, match="the prompt 'p1' has no column 'hint'"):
        fits.asked(replace(told, tags={}), routed)


def test_what_is_asked_fits_into_the_shorter_of_both_contexts(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 24}')
    recipe = parse_recipe({"algorithm": {"name": "distill"}, "roles": {"teacher": {"name": "small"}}})
    assert [shared_context(recipe, tmp_path, policys) for policys in (16, 32)] == [16, 24]
    assert shared_context(parse_recipe({}), tmp_path, 32) == 32


def test_the_kl_from_the_teacher_falls(teacher, tmp_path):
    changes = {"algorithm": {"name": "distill", "top_k": 8}, "roles__teacher": {"name": teacher}}
    folder = start(tmp_path, **changes, run__steps=12, optimizer__lr=0.003, guards__rehearsal=True).folder
    told = [row["distill/kl"] for row in lines(folder / "metrics.jsonl")[1:]]
    assert sum(told[-3:]) < 0.7 * sum(told[:3])


def test_plain_prompts_and_a_teacher_are_enough(teacher, tmp_path):
    """Nobody judges: no number looks like answers that are all wrong, and a resume goes on as ever."""
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"text": "{n:b}"}}\n' for n in range(8)))
    changes = {
        "algorithm": {"name": "distill"}, "roles__teacher": {"name": teacher}, "rewards": [], "evaluate": {},
        "model__scratch__warmup_steps": 0,  # which would imitate answers
        "task": {"source": {"kind": "jsonl", "path": "asked.jsonl"}, "prompt": "{text}=", "holdout": {"prompts": 2}},
    }  # fmt: skip
    whole, begun = (start(tmp_path, run__steps=steps, **changes).folder for steps in (2, 1))
    resume(begun, changes=["run.steps=2"], allow=["run.steps"])
    assert_same_run(whole, begun, step=2)
    for row in lines(whole / "metrics.jsonl"):
        assert not [name for name in row if name.startswith(("reward/", "eval/"))]
        assert row["groups/used"] == 3 and row["groups/dead"] == 0 and row["kl/reference"] > 0
    answers = lines(whole / "samples" / "step-000002.jsonl")
    assert [(each["reward"], each["failure"], each["used"]) for each in answers] == [(None, None, True)] * 12
    assert "yes, advantage" in page(answers, {}) and "no verdict" not in page(answers, {})
    assert [each.text for each in health(RunRecord(whole))] == ["Steps end."]
    with pytest.raises(RecipeError, match="nobody says of an answer that it is right"):
        evaluate_run(whole)
    assert evaluate_run(whole, changes=["rewards=[{kind: signal, signal: tokens}]"]).n == 2


def problems(folder, **changes):
    with pytest.raises(RecipeError) as caught:
        recipe_in(folder, **changes)
    return {problem.field: problem.reason for problem in caught.value.problems}


def test_recipes_that_cannot_distil_are_refused(teacher, tmp_path):
    distill = {"name": "distill"}
    assert "learns from a teacher" in problems(tmp_path, algorithm=distill)["roles.teacher"]
    assert "asks no teacher" in problems(tmp_path, roles__teacher={"name": teacher})["roles.teacher"]
    named = {"roles__teacher": {"name": teacher}}
    assert "algorithm.kl.coef" in problems(tmp_path, algorithm={**distill, "kl": {"coef": 0.1}}, **named)
    assert "algorithm.top_k" in problems(tmp_path, algorithm={**distill, "top_k": 3}, engine__top_p=0.9, **named)
    assert (
        "nothing to teach"
        in problems(tmp_path, algorithm=distill, roles__teacher={"name": "scratch"})["roles.teacher.name"]
    )
    assert "roles.teacher.name" in problems(tmp_path, algorithm=distill, roles__teacher={"name": "./no"})
    recipe = recipe_in(tmp_path, algorithm={**distill, "top_k": 3}, **named)
    assert "KL(p, p_teacher)" in objective(recipe) and "3 likeliest tokens" in objective(recipe)
    assert deep_problems(recipe, tmp_path) == []


def test_a_teacher_is_not_stored_in_few_bits(teacher, tmp_path):
    changes = {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}, "model__quantize": "int8"}
    recipe = recipe_in(tmp_path, algorithm={"name": "distill"}, roles__teacher={"name": teacher}, **changes)
    plain = Sequential(recipe, tmp_path)
    try:
        worker = plain.worker
        stored = [
            any(isinstance(layer, QuantisedLinear) for layer in network.modules())
            for network in (worker.policy.network, worker.models["reference"].model.network)
        ]
        assert stored == [True, False]
    finally:
        asyncio.run(plain.close())
