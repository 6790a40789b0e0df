"""How a worker makes its models, and what makes, trains and asks them, from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto.algorithms.base import Algorithm
from stretto.algorithms.catalog import learns_from_rows, trains_reward_model
from stretto.engines.base import Engine
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.lane import FIRST
from stretto.engines.native.truncation import Truncation
from stretto.engines.native.unpacked import UnpackedEngine
from stretto.engines.own import own_engine
from stretto.errors import RecipeError
from stretto.models import expert_choices
from stretto.models.load import DTYPES, Policy, load
from stretto.models.reward_policy import load_reward_policy
from stretto.models.scalar_head import Base, FrozenScorer, base_network, concerning, load_scorer
from stretto.models.source import locate
from stretto.models.template_file import use_template
from stretto.models.value_model import ValueModel, load_value_model
from stretto.recipe.schema import ApartEngineSection, NativeEngineSection, Recipe, UpdateSection, VllmEngineSection
from stretto.training.critic_trainer import CriticTrainer
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.optimizer import MasterAdamW
from stretto.training.teacher import Teacher
from stretto.training.trainer import Trainer
from stretto.training.whitening import WhiteningTrainer
from stretto.types import Conversation
from stretto.workers.lanes import lane_engine
from stretto.workers.served import served_engine
from stretto.workers.vllm import vllm_engine
from stretto.workers.worker_spec import WorkerSpec

PROVES = NativeEngineSection()
"""The engine of a worker that generates nothing."""

EngineFactory = Callable[[Policy], Engine]
"""Makes what generates with a policy."""


class ScoringModel(Protocol):
    """A model that says something of conversations."""

    def score(self, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """Numbers of each conversation."""
        ...


class FrozenReference:
    """The policy as it was before training: a frozen copy, or the policy without its adapter."""

    def __init__(self, policy: Policy, copy: Policy | None, trainer: Callable[[], Trainer]) -> None:
        """`trainer` packs and computes; a worker may get another one."""
        self.policy, self.copy, self.trainer = policy, copy, trainer

    def score(self, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """The log-probability of every trained token."""
        scorer = self.copy or self.policy
        return self.trainer().score(conversations, reference=scorer, without_adapter=self.copy is None)


def make_reference(
    spec: WorkerSpec, policy: Policy, trainer: Callable[[], Trainer]
) -> tuple[Policy | None, ScoringModel]:
    """What log-probabilities are compared with, and its own weights where it has any: a teacher, a frozen copy, or the
    policy without its adapter. One that is cut over several processes is made once they have met."""
    recipe, asked = spec.recipe, "reference" in spec.roles
    if recipe.roles.teacher is not None and asked:
        teacher = load_teacher(spec, policy)
        return teacher.model, teacher
    own = asked and policy.adapted is None and "reference" not in spec.slices
    copy = load_policy(spec, spec.torch_device) if own else None
    if copy is not None:
        copy.network.requires_grad_(False)
    return copy, FrozenReference(policy, copy, trainer)


def load_teacher(spec: WorkerSpec, policy: Policy) -> Teacher:
    """The model that a recipe distils from."""
    recipe, section = spec.recipe, spec.recipe.roles.teacher
    assert section is not None and section.name is not None  # checks were there before
    itself = section.name == "scratch"
    name = recipe.model.name if itself else section.name
    asked = recipe.model.model_copy(update={"name": name, "adapter": None, "quantize": "none"})
    base = spec.base if itself else None
    with concerning("model.name" if itself else "roles.teacher.name"):
        model = load(asked, locate(name, spec.root), seed=recipe.seed, device=spec.device_of("reference"), base=base)
    model.network.requires_grad_(False)
    return Teacher(
        model,
        temperature=recipe.engine.temperature,
        token_budget=spec.token_budget,
        candidates=getattr(recipe.algorithm, "top_k", None),
        vocabulary=len(policy.head().weight),
    )


def make_trainer(
    policy: Policy,
    algorithm: Algorithm,
    recipe: Recipe,
    optimizer: MasterAdamW | None,
    *,
    token_budget: int,
    whitens: bool = False,
) -> Trainer:
    """What trains a policy as a recipe says, in this process or in a worker's; `whitens` if it is given advantages that
    are not whitened yet."""
    kind = WhiteningTrainer if whitens else Trainer
    return kind(policy, algorithm, optimizer, **settings_of(recipe, token_budget))


def load_policy(spec: WorkerSpec, device: torch.device) -> Policy:
    """The model that a recipe trains, as it is before training: a language model, or one made a reward model."""
    recipe = spec.recipe
    how = load_reward_policy if trains_reward_model(recipe.algorithm.name) else load
    files = locate(recipe.model.name, spec.root)
    policy = how(recipe.model, files, seed=recipe.seed, device=device, base=spec.base)
    use_template(policy.tokenizer, recipe.task, spec.root)
    if not getattr(recipe.engine, "router_replay", False):
        return policy
    if policy.apart:
        reason = "needs packed rows, which this model's layers cannot be given"
        raise RecipeError.of(expert_choices.FIELD, reason, "leave it out")
    return replace(policy, routing=expert_choices.follow_choices(policy.network))


def settings_of(recipe: Recipe, token_budget: int) -> dict[str, Any]:
    """What a trainer takes from a recipe. Answers of the data were drawn at no temperature."""
    return {
        "token_budget": token_budget,
        "temperature": 1.0 if learns_from_rows(recipe.algorithm.name) else recipe.engine.temperature,
        "clip": recipe.optimizer.clip,
        "checkpointing": recipe.optimizer.checkpointing,
        "staleness": recipe.placement.staleness,
    }


def load_critic(spec: WorkerSpec, policy: Policy) -> ValueModel | None:
    """The critic that is trained, where a cell of the device asks or trains it; the same in every process."""
    recipe, section = spec.recipe, spec.recipe.roles.critic
    if section is None or section.name is None or section.optimizer is None or not spec.roles & {"value", "fit"}:
        return None
    device = spec.device_of("fit")
    return load_value_model(
        locate(section.name, spec.root),
        base=_base_of(spec, device, as_stored=recipe.critic_shares_base),
        adapter=section.adapter,
        shared=policy if policy.device == device else None,
        dtype=DTYPES[recipe.model.dtype],
        device=device,
        seed=recipe.seed,
    )


def make_critic_trainer(
    model: ValueModel, parts: Sequence[Mapping[str, nn.Parameter]], spec: WorkerSpec
) -> CriticTrainer:
    """What trains a critic as a recipe says; without an optimizer on a device that only asks it, or has yet to get its
    slices."""
    recipe, section = spec.recipe, critic_optimizer(spec)
    trains = "fit" in spec.roles and "fit" not in spec.slices
    updates = recipe.planned_updates(critic=True)
    optimizer = make_optimizer(parts[spec.share("fit")[0]], section, updates=updates) if trains else None
    return CriticTrainer(model, spec.algorithm(), optimizer, **critic_settings(spec))


def critic_optimizer(spec: WorkerSpec) -> UpdateSection:
    """The section of the optimizer of a critic that is trained."""
    section = spec.recipe.roles.critic
    assert section is not None and section.optimizer is not None  # the critic was loaded
    return section.optimizer


def critic_settings(spec: WorkerSpec) -> dict[str, Any]:
    """What the trainer of a critic takes from a recipe."""
    gae = getattr(spec.recipe.algorithm, "gae", None)
    return settings_of(spec.recipe, spec.token_budget) | {"clip": critic_optimizer(spec).clip, "gae": gae}


def _base_of(spec: WorkerSpec, device: torch.device, *, as_stored: bool = False) -> Base:
    """How the network that is trained is loaded once more."""
    recipe, files = spec.recipe, locate(spec.recipe.model.name, spec.root)
    return base_network(recipe.model, files, seed=recipe.seed, device=device, base=spec.base, as_stored=as_stored)


def load_scorers(spec: WorkerSpec) -> Iterator[tuple[str, FrozenScorer]]:
    """Role and its frozen model, of those roles of a device that are played by one, each loaded when it is asked for;
    the same in every process."""
    recipe, critic = spec.recipe, spec.recipe.roles.critic
    frozen = critic if critic is not None and critic.optimizer is None else None
    sections = {"reward": recipe.roles.reward_model, "value": frozen}
    for role, section in sections.items():
        if role in spec.roles and section is not None and section.name is not None:
            yield (
                role,
                load_scorer(
                    role,
                    locate(section.name, spec.root),
                    base=_base_of(spec, spec.device_of(role)),
                    dtype=DTYPES[recipe.model.dtype],
                    device=spec.device_of(role),
                    seed=recipe.seed,
                    token_budget=spec.token_budget,
                ),
            )


def engine_maker(spec: WorkerSpec) -> EngineFactory:
    """What makes the recipe's engine; one of the user's is imported here."""
    section, lane = spec.recipe.engine, spec.lane
    if isinstance(section, NativeEngineSection):
        if section.memory_share == "auto" and spec.memory_share is not None:
            section = section.model_copy(update={"memory_share": spec.memory_share})
        if lane is None:
            return partial(native_engine, section=section)
        return partial(lane_engine, section=section, lane=lane, device=spec.torch_device)
    if isinstance(section, ApartEngineSection):
        # Where nobody generates, or another device answers for all, what proves its weights is the policy itself.
        generates = "generate" in spec.roles and (lane is None or lane.rank == FIRST)
        if not generates:
            return partial(native_engine, section=PROVES)
        if section.url is not None:
            return partial(served_engine, section=section, url=section.url, spec=spec)
        assert isinstance(section, VllmEngineSection)
        return partial(vllm_engine, section=section, spec=spec)
    return own_engine(section.kind, spec.folders, where=spec.where)


def native_engine(policy: Policy, section: NativeEngineSection) -> NativeEngine:
    """The engine that reads the policy's own tensors."""
    truncation = Truncation(top_p=section.top_p, top_k=section.top_k)
    if policy.apart:
        return UnpackedEngine(policy, memory_share=section.memory_share, truncation=truncation)
    return NativeEngine(
        policy,
        memory_share=section.memory_share,
        speculate=section.speculate,
        graphs=bool(section.graphs),
        truncation=truncation,
    )
