"""A resolved recipe in words: the objective as a formula with its numbers, the batch and the plan in a sentence each.

What is printed follows from the same keys and the same catalog that training reads, so it is the recipe, not a
promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeVar

from stretto.algorithms.catalog import AlgorithmFacts, estimator_of, facts_of, find_facts, learns_from_rows
from stretto.checks.rules.base import DEFAULTS, is_default
from stretto.placement.strategies import find_strategy
from stretto.recipe.describe_engine import copy_sentence
from stretto.recipe.resolve import Width, resolve, taught_alone, vstar_of
from stretto.recipe.schema import (
    AlgorithmSection,
    Choice,
    ClippedAlgorithm,
    Distill,
    ModelSection,
    MultiConv,
    Recipe,
    RoleModel,
    UpdateSection,
    Vstar,
    choices_in,
)

ESTIMATORS = {
    "k1": "k1 = lp - lp_ref",
    "k2": "k2 = (lp - lp_ref)^2 / 2",
    "k3": "k3 = exp(lp_ref - lp) - 1 - (lp_ref - lp)",
}
"""The formulas of `algorithms.kl`."""

CORRECTIONS = {
    "token": "exp(lp_trainer - lp_engine)",
    "sequence": "exp(sum over the answer of lp_trainer - lp_engine)",
    "geometric": "exp(mean over the answer of lp_trainer - lp_engine)",
}
"""The formulas of `algorithms.correction`."""

TURNS = "of each turn alone: R in A is the verdict and what this turn and all later ones were worth"
"""What `credit: turn` makes of an advantage."""


def objective(recipe: Recipe) -> str:
    """The loss of a resolved recipe with its numbers, then what its symbols stand for, a line each."""
    facts, section = facts_of(recipe.algorithm.name), recipe.algorithm
    if facts.regresses:
        return "\n".join(_regression(recipe, vstar_of(recipe)))
    if facts.rows != "prompts":
        centring = getattr(section, "centring", 0.0)
        centered = f" + {centring:g} * (s of the better + s of the worse)^2, averaged alike" if centring else ""
        return f"loss = -{facts.average} of {facts.surrogate}{centered}\n{facts.advantage}"
    if isinstance(section, Distill) and section.top_k is not None:
        return "\n".join(_exactly_taught(recipe, section))
    low, high = _clip(recipe) or (0.0, 0.0)
    gain = facts.surrogate.format(low=low, high=high)
    weight = "" if section.correction.kind == "none" else "w * "
    lines = [f"loss = -{_average(section, facts)} of {weight}{gain}"]
    if section.kl.coef > 0 and section.kl.where == "loss":
        lines[0] += f" + {section.kl.coef:g} * {_estimator(recipe)}, averaged alike"
    lines += [facts.advantage, *[TURNS] * (section.credit == "turn"), *_teacher(recipe), *_critic(recipe)]
    lines += [*_reward(recipe), *_score(recipe), _ratio(recipe)]
    if weight:
        ratio = CORRECTIONS[section.correction.kind]
        lag = "; lp_engine is of the weights one version before, and so is lp_trainer"
        older = lag if recipe.placement.staleness else ""
        lines.append(f"w = min({ratio}, {section.correction.cap:g}), without gradient{older}")
    if section.kl.coef > 0:
        lines.append(_pull(recipe))
    if "vstar" in facts.needs:
        lines.append(f"V* = the largest R of {vstar_of(recipe).samples} answers of the reference")
    return "\n".join(lines)


def _average(section: AlgorithmSection, facts: AlgorithmFacts) -> str:
    """What the sum over tokens is divided by, before the sum."""
    if isinstance(section, MultiConv) and section.average == "trajectory":
        return "1/trajectories * sum over trajectories of 1/its tokens * sum over its tokens"
    return facts.average.format(constant=getattr(section, "constant", None))


def _regression(recipe: Recipe, vstar: Vstar) -> list[str]:
    """A*PO: a squared error instead of a gain."""
    facts = facts_of(recipe.algorithm.name)
    mean = "the largest R" if vstar.beta1 == 0 else f"{vstar.beta1:g} * log of the mean of exp(R / {vstar.beta1:g})"
    return [
        f"loss = {facts.average} of ({vstar.beta2:g}*D - A)^2",
        facts.advantage,
        f"D = sum over the answer's tokens of lp - lp_ref, lp_ref {_reference(recipe)}",
        f"V* = {mean} over {vstar.samples} answers of the reference, made once by `stretto value`",
        *_reward(recipe),
        *_score(recipe),
    ]


def _teacher(recipe: Recipe) -> Iterator[str]:
    """Who teaches, and what rewards add."""
    if not isinstance(section := recipe.algorithm, Distill):
        return
    if section.reward_weight > 0 and section.top_k is None:
        yield f"and {section.reward_weight:g} * (R - mean(R of the group)) is added to A"
    who, told = recipe.roles.teacher, ""
    if who is not None and who.prompt is not None:
        told = ", which is asked roles.teacher.prompt"
    yield f"p_teacher = the probabilities of {_teaching(who)}{told}; lp in A is the engine's"


def _exactly_taught(recipe: Recipe, section: Distill) -> Iterator[str]:
    """The KL itself instead of an estimate of its gradient."""
    weight = section.reward_weight
    gain = f" - {weight:g} * 1/tokens * sum over tokens of rho*(R - mean(R of the group))" if weight else ""
    yield f"loss = 1/tokens * sum over tokens of KL(p, p_teacher){gain}"
    yield f"KL = sum of p * log(p / p_teacher) over the teacher's {section.top_k} likeliest tokens and the rest as one"
    yield from _teacher(recipe)
    yield from _reward(recipe)


def _critic(recipe: Recipe) -> Iterator[str]:
    """The formulas of `algorithms.gae`, where the recipe has their numbers."""
    if gae := getattr(recipe.algorithm, "gae", None):
        gamma, lam = gae.gamma, f"{gae.lam:g}"
        if gae.length_alpha is not None:
            lam = f"max(0, 1 - 1/({gae.length_alpha:g} * trained tokens of the trajectory))"
        yield f"GAE = delta + {gamma:g}*{lam} * GAE of the next token"
        yield f"delta = r + {gamma:g} * V of the next token - V; V = the value of {_valued(recipe)}"
        yield "r = what of R falls on a token: the verdict on the last one, a penalty on its own"
        if trains_critic(recipe):
            look = gae.lam if gae.critic_lam is None else gae.critic_lam
            yield (
                f"critic's loss = 1/tokens * sum over tokens of max((V - T)^2, (clip(V, V_old-{gae.value_clip:g}, "
                f"V_old+{gae.value_clip:g}) - T)^2) / 2, T = V_old + the GAE with lambda {look:g}"
            )
            if steps := recipe.roles.critic.warmup_steps if recipe.roles.critic else 0:
                yield f"in the first {steps} steps the critic learns alone"


def _valued(recipe: Recipe) -> str:
    """The critic, and what of it is trained."""
    critic = recipe.roles.critic
    if critic is None or critic.optimizer is None:
        return _named(critic)
    what = "a critic that begins as the model before training with a head of zeros"
    if critic.name != "scratch":
        what = f"a critic that begins as {critic.name or 'a model'}"
    rank = "all of it" if critic.adapter is None else f"a LoRA of rank {critic.adapter.rank}"
    return f"{what}; {rank} is trained, with lr {_rate(critic.optimizer)}"


def _rate(section: UpdateSection) -> str:
    """Peak learning rate; `auto` while the model's hidden size is not known."""
    return "auto" if section.lr == "auto" else f"{section.lr:g}"


def _score(recipe: Recipe) -> Iterator[str]:
    """What a reward model's part of the reward is."""
    for part in recipe.rewards:
        if part.kind == "model":
            yield f"{part.name} = the score of {_named(recipe.roles.reward_model)}"


def _teaching(model: RoleModel | None) -> str:
    """Who teaches."""
    return "the policy as it was before training" if model and model.name == "scratch" else _named(model)


def _named(model: RoleModel | None) -> str:
    """A model that is not trained."""
    if model is not None and model.name == "scratch":
        return "a head of noise on the model as it was before training"
    return f"{(model and model.name) or 'a model'}, which is not trained"


def _reward(recipe: Recipe) -> Iterator[str]:
    """What an answer is worth, where anybody judges it."""
    if not recipe.rewards:
        return
    parts = " + ".join(part.name if part.weight == 1 else f"{part.weight:g}*{part.name}" for part in recipe.rewards)
    kl, idle = recipe.algorithm.kl, ", which is only reported" if taught_alone(recipe) else ""
    pull = f" - {kl.coef:g} * sum over tokens of {_estimator(recipe)}" if kl.coef > 0 and kl.where == "reward" else ""
    pull += f"; {kl.coef:g} adapts until the KL is {kl.adaptive.target:g} per token" if pull and kl.adaptive else ""
    yield f"R = {parts.replace('+ -', '- ')}{pull}{idle}"


def _clip(recipe: Recipe) -> tuple[float, float] | None:
    return recipe.algorithm.clip if isinstance(recipe.algorithm, ClippedAlgorithm) else None


def _ratio(recipe: Recipe) -> str:
    updates, clip = recipe.batch.updates_a_step, _clip(recipe)
    if recipe.placement.staleness:
        active = f": clip {clip[0]:g}/{clip[1]:g} acts" if clip else ""
        return f"rho = exp(lp - lp_old), lp_old of the weights that sampled, one version before{active}"
    if updates == 1:
        inactive = f": clip {clip[0]:g}/{clip[1]:g} is inactive on policy" if clip else ""
        return f"rho = exp(lp - lp_old) = 1, because a step makes one update{inactive}"
    active = f": clip {clip[0]:g}/{clip[1]:g} acts from the second on" if clip else ""
    return f"rho = exp(lp - lp_old), lp_old before the first of {updates} updates{active}"


def _pull(recipe: Recipe) -> str:
    where, name = recipe.algorithm.kl.where, _estimator(recipe)
    idle = "; as a loss its expected gradient is 0 on policy" if (name, where) == ("k1", "loss") else ""
    lp = "; lp is the engine's" if where == "reward" else ""
    return f"{ESTIMATORS[name]}, lp_ref {_reference(recipe)}{lp}{idle}"


def _estimator(recipe: Recipe) -> str:
    """By its name, also where the recipe leaves it open."""
    return estimator_of(recipe.algorithm.kl.estimator, recipe.algorithm.kl.where)


def _reference(recipe: Recipe) -> str:
    return "with the adapter off" if recipe.model.adapter else "of a frozen copy"


def batch_sentence(recipe: Recipe) -> str:
    """What one step generates and how often it updates: `64 prompts x 8 samples = 512 trajectories, one update`."""
    batch = recipe.batch
    if (facts := find_facts(recipe.algorithm.name)) and facts.rows != "prompts":
        return f"{_count(batch.prompts, facts.rows.removesuffix('s'))} of the task, one update"
    total = batch.prompts * batch.samples
    made = f"{total} trajector{'y' if total == 1 else 'ies'}"
    size = f"{_count(batch.prompts, 'prompt')} x {_count(batch.samples, 'sample')} = {made}"
    epochs = f"{_count(batch.epochs, 'epoch')} of " if batch.epochs > 1 else ""
    if batch.updates == 1:
        return f"{size}, {epochs}one update"
    share = f"{total // batch.updates}" if total % batch.updates == 0 else f"about {total / batch.updates:.0f}"
    return f"{size}, {epochs}{batch.updates} updates of {share} each"


def data_sentence(recipe: Recipe, training: int, heldout: int) -> str:
    """Numbers of rows to train on and held out, and the steps in which each of the former comes once."""
    word = (facts.rows if (facts := find_facts(recipe.algorithm.name)) else "prompts").removesuffix("s")
    steps = math.ceil(training / math.ceil(recipe.batch.prompts * recipe.batch.oversample))
    dropped = "" if recipe.task.drop_longer_than is None else ", with those that task.drop_longer_than drops"
    return (
        f"{_count(training, word)} to train on, {heldout} held out{dropped}; one epoch is {_count(steps, 'step')}, "
        f"the run has {recipe.run.steps}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def trains_critic(recipe: Recipe) -> bool:
    """True if the critic learns; one without an optimizer comes trained."""
    return recipe.roles.critic is not None and recipe.roles.critic.optimizer is not None


def reads_policy(recipe: Recipe) -> bool:
    """True if the reference is the policy itself with its adapter switched off."""
    return recipe.model.adapter is not None and recipe.roles.teacher is None


def reading_roles(recipe: Recipe) -> set[str]:
    """Roles that read the trainer's own tensors where they lie on its device: a critic's values those of what trains
    it."""
    return {"generate"} | ({"reference"} if reads_policy(recipe) else set()) | ({"value"} & roles_of(recipe))


def roles_of(recipe: Recipe) -> frozenset[str]:
    """Roles that a step of this recipe needs."""
    facts = find_facts(recipe.algorithm.name)
    needs = facts.needs if facts else frozenset()
    if facts and facts.rows != "prompts":
        return frozenset({"train", *(["generate"] if recipe.rewards else [])})
    asked = {
        "reference": recipe.algorithm.kl.coef > 0 or "reference" in needs,
        "value": "values" in needs,
        "fit": "values" in needs and trains_critic(recipe),
        "reward": recipe.roles.reward_model is not None,
    }
    return frozenset({"generate", "train", *(role for role, there in asked.items() if there)})


MODELS = {"reward": "reward model", "reference": "reference", "value": "critic"}
"""Role -> the model that only scores."""


def plan_sentence(recipe: Recipe) -> str:
    """Where the models live and in what order stages run."""
    cluster = recipe.placement.cluster
    one = {"auto": "one device (a GPU if there is one)", "1xcpu": "the CPU", "1xgpu": "one GPU"}.get(cluster)
    models = [f"the {MODELS[role]}" for role in MODELS if role in roles_of(recipe)]
    asked = " and ".join([*([", ".join(models[:-1])] if models[1:] else []), *models[-1:]])
    asking = f"{' and asks' if one else ', ask'} {asked}" if asked else ""
    if learns_from_rows(recipe.algorithm.name):
        return f"every step trains on rows of the task, on {one or cluster}; nothing is sampled"
    direct = "; gradients and weights pass from card to card by NCCL" if recipe.placement.nccl else ""
    apart = copy_sentence(recipe.engine)
    if one:
        return (
            f"flatten on {one}: every step generates, then scores{asking}, then trains"
            f"{apart or '; the engine samples from the very tensors that are trained'}"
        )
    if recipe.placement.cells:
        return f"cells by hand on {cluster}{direct}{apart}"
    strategy = recipe.placement.strategy
    if strategy == "auto":
        return f"auto on {cluster}: chosen when a run starts, as `stretto plan` would now{direct}{apart}"
    lags = "; what they generate is trained on in the next step (staleness 1)" if recipe.placement.staleness else ""
    return f"{strategy} on {cluster}: {find_strategy(strategy).sentence.format(asking=asking)}{lags}{direct}{apart}"


def changes_of(recipe: Recipe, width: Width = attrgetter("width")) -> list[tuple[str, object, object]]:
    """(dotted name, value, default) of every key whose value is not what leaving it out would have given."""
    usual = resolve(recipe.model_copy(update={"optimizer": DEFAULTS.optimizer}), width).optimizer
    if recipe.optimizer.lr != usual.lr:  # a rate that is stated has no warm-up of its own
        usual = usual.model_copy(update={"warmup": DEFAULTS.optimizer.warmup})
    named = recipe.model_copy(
        update={
            **{key: getattr(DEFAULTS, key) for key in Recipe.model_fields},
            "model": ModelSection(name=recipe.model.name),
            "task": DEFAULTS.task.model_copy(update={"source": _only_kind(recipe.task.source)}),
            "environment": _only_kind(recipe.environment),
            "rewards": tuple(_only_kind(part) for part in recipe.rewards),
            "algorithm": _only_kind(recipe.algorithm),
            "engine": _only_kind(recipe.engine),
            "optimizer": usual,
        }
    )
    own: list[tuple[str, object, object]] = (
        [("model.name", recipe.model.name, DEFAULTS.model.name)] if not is_default(recipe, "model.name") else []
    )
    for path, section in choices_in(recipe):
        first = type(section).union().records()[0]
        own += [
            (f"{path}.{key}", getattr(section, key), default)
            for key in section.label()
            if getattr(section, key) != (default := getattr(first.model_fields.get(key), "default", None))
        ]
        own += [(f"{path}.{key}", getattr(section, key), None) for key in _required(section)]
    return own + list(_differences(recipe.model_dump(mode="json"), resolve(named).model_dump(mode="json"), ""))


Kind = TypeVar("Kind", bound=Choice)


def _only_kind(section: Kind) -> Kind:
    """The section as it would be if it said nothing but of which kind it is."""
    return type(section)(**{key: getattr(section, key) for key in {*section.label(), *_required(section)}})


def _required(section: Choice) -> list[str]:
    """The keys that the kind of a section has no default for, besides those that tell which kind it is."""
    fields = type(section).model_fields.items()
    return [key for key, field in fields if field.is_required() and key not in section.label()]


def _differences(value: Any, default: Any, name: str) -> Iterator[tuple[str, object, object]]:
    if isinstance(value, dict) and isinstance(default, dict):
        for key in value:
            yield from _differences(value[key], default.get(key), f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and isinstance(default, list):
        for index, (item, usual) in enumerate(zip(value, default, strict=False)):
            yield from _differences(item, usual, f"{name}.{index}")
    elif value != default:
        yield name, value, default
