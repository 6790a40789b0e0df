"""Rules of the diagnosis over steps that are made up: what holds when, each line once an episode, and not for noise."""

import random
from dataclasses import replace

import pytest

from sample_rows import row
from stretto.recipe.load import parse_recipe
from stretto.report.diagnosis import Diagnosis, WatchedRecipe, diagnose
from stretto.report.step_facts import StepFacts, facts_of

ABOUT = WatchedRecipe(samples=8, max_new_tokens=32, lr=0.1, judging=("correct", "format"))
HEALTHY = {
    "reward/mean": 0.4, "reward/std": 0.4, "reward/outcome": 0.4, "reward/part/correct": 0.4, "reward/part/format": 0.4,
    "length/mean": 12.0, "length/truncated": 0.05, "groups/dead": 2.0, "groups/infra": 0.0, "entropy": 1.0,
    "trajectories/launched": 64.0, "grad_norm": 0.3,
}  # fmt: skip


def step(number, *, unended=0.0, marked=0.0, ran_on=0.0, follows=None, **metrics):
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepFacts(
        step=number, metrics=HEALTHY | named, answers=64, unended=unended, marked=marked, ran_on=ran_on,
        follows_length=follows or {},
    )  # fmt: skip


def told(facts, about=ABOUT):
    return diagnose(facts, about)


def test_noise_around_a_course_that_rises_holds_at_nothing():
    chance = random.Random(0)
    for _ in range(30):
        facts = []
        for number in range(1, 61):
            rate = min(0.97, 0.1 + number / 50)
            reward = max(0.0, min(1.0, chance.gauss(rate, (rate * (1 - rate) / 64) ** 0.5)))
            dead = sum(chance.random() < rate**8 + (1 - rate) ** 8 for _ in range(8))
            facts.append(
                step(number, reward__mean=reward, reward__outcome=reward, reward__std=(reward * (1 - reward)) ** 0.5,
                     reward__part__correct=reward, groups__dead=dead, length__mean=chance.gauss(12, 1),
                     entropy=1.0 - number / 80, grad_norm=chance.lognormvariate(-1, 0.4))
            )  # fmt: skip
            assert told(tuple(facts[-40:])) == {}


def test_cut_off_answers_name_the_key_and_its_value():
    facts = [step(n, length__truncated=0.52) for n in range(6)]
    assert told(facts) == {"cut_off": "52% of answers hit engine.max_new_tokens=32: raise it"}
    falling = [step(n, length__truncated=0.6 - n / 20) for n in range(6)]
    assert told(falling) == {}


def test_groups_without_a_contrast():
    facts = [step(n, groups__dead=5) for n in range(10)]
    assert told(facts)["few"].startswith(
        "5 of 8 groups taught nothing in each of the last 5 steps: easier prompts or more"
    )
    rising = [step(n, groups__dead=5, reward__mean=0.1 + n / 20, reward__std=0.1) for n in range(10)]
    assert told(rising) == {}
    none = [step(n, groups__dead=8, reward__outcome=0.0, reward__mean=0.0) for n in range(3)]
    assert "no answer was right" in told(none)["dead"]
    alike = [step(n, groups__dead=8, reward__outcome=0.3) for n in range(3)]
    assert "engine.temperature" in told(alike)["dead"]
    solved = [step(n, groups__dead=8, reward__outcome=1.0) for n in range(12)]
    assert told(solved) == {}


def test_a_part_that_is_never_earned_is_named():
    facts = [step(n, reward__part__format=0.0) for n in range(5)]
    assert told(facts)["part"].startswith("format was never earned in 320 answers")
    assert told([*facts, step(5, reward__part__format=0.02)]) == {}


def test_a_rate_that_is_too_high_has_a_fall_and_a_sign():
    fell = [step(n, reward__mean=0.5) for n in range(5)] + [step(n, reward__mean=0.05) for n in range(5, 9)]
    assert told(fell) == {}, "a fall alone may be a harder batch"
    collapsed = [*fell[:5], *(step(n, reward__mean=0.05, entropy=0.01) for n in range(5, 9))]
    assert "optimizer.lr=0.1 is probably too high" in told(collapsed)["rate"]
    assert "the entropy went from 1 to 0.01" in told(collapsed)["rate"]
    jumped = [*fell[:5], *(step(n, reward__mean=0.05, grad_norm=9.0) for n in range(5, 9))]
    assert "the gradient norm jumped to 9" in told(jumped)["rate"]
    kept = [step(n, entropy=1.0 - n / 10) for n in range(9)]
    assert told(kept) == {}
    sudden = [step(0), *(step(n, entropy=0.01, groups__dead=8.0) for n in range(1, 4))]
    assert "the entropy went from 1 to 0.01 in 3 steps, at a reward of 0.40: optimizer.lr" in told(sudden)["rate"]
    solved = [step(0), *(step(n, entropy=0.01, groups__dead=8.0, reward__outcome=1.0) for n in range(1, 4))]
    assert told(solved) == {}


def test_where_nothing_is_rewarded_no_reward_falls():
    entropies = [1.0] * 4 + [0.01] * 5
    rows = [replace(step(n), metrics={"grad_norm": 5.0, "entropy": h}, answers=0) for n, h in enumerate(entropies)]
    assert told(rows) == {}, "rows are learned from as they are"
    never = [step(n, reward__mean=0.0, entropy=h) for n, h in enumerate(entropies)]
    assert "the reward fell" not in told(never).get("rate", "")


def test_a_reward_that_is_hacked_by_length():
    def course(**last):
        early = [step(n, length__mean=10.0, reward__mean=0.3, follows={"format": 0.9}) for n in range(6)]
        late = [step(n, length__mean=20.0, reward__mean=0.7, follows={"format": 0.9}, **last) for n in range(6, 12)]
        return early + late

    line = told(course(reward__part__format=0.9))["length"]
    assert "(10 to 20 tokens; format follows it)" in line and "correct stays at 0.40" in line
    assert told(course(reward__part__correct=0.8)) == {}, "longer answers that are right more often"


def test_a_wrong_template_is_seen_in_what_the_model_writes():
    assert "chat template" in told([step(n, marked=0.5) for n in range(3)])["template"]
    runs_on = told([step(n, unended=1.0, ran_on=0.6, length__truncated=1.0) for n in range(5)])
    assert list(runs_on) == ["template"] and "go on behind the right answer" in runs_on["template"]
    short = told([step(n, unended=1.0, length__truncated=1.0) for n in range(5)])
    assert "engine.max_new_tokens=32: raise it; if they still do not end" in short["cut_off"]


def test_each_line_is_told_once_an_episode():
    watch = Diagnosis(
        parse_recipe({"optimizer": {"lr": 2e-4}, "rewards": [{"kind": "exact"}], "engine": {"max_new_tokens": 32}})
    )

    def take(number, share):
        return watch.step(number, HEALTHY | {"length/truncated": share}, [row()] * 64)

    lines = [(n, list(take(n, 0.5))) for n in range(1, 12)]
    assert [n for n, names in lines if names] == [5]
    assert not any(take(n, 0.0) for n in range(12, 18))
    assert [n for n in range(18, 26) if take(n, 0.5)] == [22]


def test_a_collapse_is_told_by_a_line_or_by_a_guard_and_never_by_both():
    def course(warned):
        watch = Diagnosis(parse_recipe({"optimizer": {"lr": 2e-4}, "rewards": [{"kind": "exact"}]}))
        fallen = {"entropy": 0.01, "groups/dead": 8.0, "reward/outcome": 0.4}
        lines = [watch.step(n, HEALTHY | (fallen if n else {}), [row()] * 64, warned=warned) for n in range(5)]
        return [name for each in lines for name in each], watch

    told, watch = course(warned=frozenset())
    assert told == ["rate"]
    assert watch.has_told("entropy_collapse") and watch.has_told("reward_collapse")
    assert not watch.has_told("memory_growth")
    told, watch = course(warned={"entropy_collapse", "loop_lag"})
    assert told == [], "neither the same again, nor what follows from it"
    assert not watch.has_told("entropy_collapse")
    assert course(warned={"loop_lag"})[0] == ["rate"]


def test_what_is_read_from_answers():
    clean, opens = row(0, 1.0), row(1, 0.0)
    for each, sampled in ((clean, [9, 2]), (opens, [9, 5])):
        each["conversations"][0] |= {"tokens": [5, 8, *sampled], "trained": [0, 0, 1, 1]}
    facts = facts_of(1, {}, [clean, opens, row(2, answer="7\nUser: what is 1+1?")], {5})
    assert facts.marked == 2 / 3
    cut = row(0, answer="7777")
    cut["conversations"][0]["stop"] = "length"
    facts = facts_of(1, {}, [cut, row(1)])
    assert (facts.unended, facts.ran_on) == (0.5, 0.5)
    longer = [row(n, n / 4, parts={"long": n / 4, "flat": 1.0}) for n in range(4)]
    for n, each in enumerate(longer):
        each["conversations"][0] |= {"tokens": [9] * (n + 1), "trained": [1] * (n + 1)}
    assert facts_of(1, {}, longer).follows_length == {"long": 1.0}


def test_an_environment_that_asks_for_fewer_tokens_is_named_where_answers_are_cut_off():
    short = [replace(step(n, length__truncated=0.5), cut_calls=(8, 8, 5)) for n in range(6)]
    assert told(short)["cut_off"].startswith(
        "50% of answers are cut off at 8 tokens or fewer, below engine.max_new_tokens"
    )
    assert "the environment asks for so few" in told(short)["cut_off"]
    most_at_the_limit = [replace(step(n, length__truncated=0.5), cut_calls=(32, 32, 5)) for n in range(6)]
    assert told(most_at_the_limit) == {"cut_off": "50% of answers hit engine.max_new_tokens=32: raise it"}


def test_the_last_call_of_a_conversation_says_at_which_length_it_was_cut_off():
    ended, cut, turns = row(0), row(1), row(2)
    cut["conversations"][0]["stop"] = turns["conversations"][0]["stop"] = "length"
    turns["conversations"][0]["turns"] = [[0, 20], [1, 3]]
    sampled = sum(cut["conversations"][0]["trained"])
    assert facts_of(1, {}, [ended, cut, turns]).cut_calls == (sampled, 3)


def evaluated(watch, **accuracies):
    """Hand evaluations to a diagnosis: `step_3=(accuracy, low)`."""
    for step, (accuracy, low) in accuracies.items():
        numbers = {"eval/accuracy": accuracy, "eval/low": low, "eval/asked": 100.0}
        watch.evaluated(int(step.removeprefix("step_")), numbers)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"step_0": (0.41, 0.32)}, (3, 0.14, 0.09), True),
        ({"step_0": (0.41, 0.32)}, (3, 0.34, 0.25), False),
        ({"step_0": (0.41, 0.32)}, (20, 0.14, 0.09), False),
        ({"step_0": (0.2, 0.13), "step_5": (0.6, 0.5)}, (15, 0.4, 0.3), True),
    ],
)
def test_diagnosis_names_the_rate_when_held_out_accuracy_falls_soon(before, now, told):
    watch = Diagnosis(parse_recipe({"optimizer": {"lr": 2e-4}}))
    evaluated(watch, **before)
    step, accuracy, low = now
    metrics = {"eval/accuracy": accuracy, "eval/low": low, "eval/asked": 100.0}
    lines = watch.step(step, metrics, [])
    assert ("optimizer.lr=0.0002 is probably too high" in lines.get("accuracy", "")) is told


def test_diagnosis_blames_no_rate_of_zero_for_a_fall():
    watch = Diagnosis(parse_recipe({"optimizer": {"lr": 0.0}}))
    evaluated(watch, step_0=(0.9, 0.83))
    assert watch.step(2, {"eval/accuracy": 0.1, "eval/low": 0.05, "eval/asked": 100.0}, []) == {}
