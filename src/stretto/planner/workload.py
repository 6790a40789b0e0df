"""What a step is, as the planner sees it: models and their roles, how many answers, how long, what is trained.

It follows from a recipe and from nothing else; no data is read, unless the recipe takes its lengths from a run. What a
recipe leaves open and a plan must know is assumed here, and said (`StepWorkload.assumed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from stretto.algorithms.catalog import facts_of
from stretto.engines.native.admission import CACHE_SHARE
from stretto.errors import Problem, RecipeError
from stretto.planner.cost.lengths import Counts, LengthDistribution
from stretto.planner.cost.precision import Precision
from stretto.planner.cost.seconds import Recorded
from stretto.planner.cost.shapes import ModelShape
from stretto.planner.cost.token_load import TokenLoad
from stretto.planner.model_shapes import shape_of_model
from stretto.planner.rounds import ASSUMED_ACCEPTANCE, DrawnRounds, draw_rounds
from stretto.planner.run_lengths import RecordedAnswers, recorded_answers
from stretto.planner.unmade import uncounted, unmade
from stretto.plugins import is_plugin
from stretto.recipe.schema import Adapter, Recipe, RoleModel
from stretto.scheduler.batch_rules import RoundRule
from stretto.scheduler.records import FORWARD, UPDATE, role_of

ASSUMED_PROMPT, ASSUMED_MEAN, ASSUMED_SIGMA = 128, 0.4, 0.8
"""Tokens of a prompt, mean answer as a share of the longest, spread of log-length: where a recipe says nothing."""
LENGTHS_ASSUMED = "lengths are assumed"
"""First words of the assumption about lengths in `StepWorkload.assumed`."""


@dataclass(frozen=True, kw_only=True)
class StepWorkload:
    """One step."""

    shapes: Mapping[str, ModelShape]
    """Role -> the model that it runs."""
    prompts: int
    """Groups that are to be trained on."""
    samples: int
    """Answers of a group."""
    updates: int
    """Optimizer updates that the answers are divided into."""
    prompt: int
    """Tokens of a prompt."""
    lengths: LengthDistribution
    """Lengths of the answers."""
    adapter: int
    """Rank of the policy's LoRA; 0 where all weights are trained."""
    critic_adapter: int = 0
    """The same of a critic that is trained."""
    reading: frozenset[str]
    """Roles that read the tensors of what is trained."""
    precision: Precision
    """Precision of products and caches."""
    base: Precision
    """Precision of frozen weights below an adapter."""
    optimizer: str = "adamw"
    """Name of the optimizer."""
    rounds_sums: bool = False
    """True if gradients are added up over cells in bfloat16."""
    critic_shares: bool = False
    """True if that LoRA sits on the policy's own base."""
    critic_optimizer: str = "adamw"
    """That of a critic that is trained."""
    recompute: bool | None = None
    """Whether activations are recomputed; none if the plan may choose."""
    epochs: int = 1
    """How often each answer is trained on."""
    budget: int | None = None
    """Most tokens of a micro-batch on one rank; none if the plan may choose."""
    share: float | None = None
    """Most of a device's memory that caches take; none for what is left."""
    oversample: float = 1.0
    """Groups that a round launches for each that is missing."""
    max_rounds: int = 1
    """Rounds at most."""
    acceptance: float | None = None
    """Share of the groups that dynamic sampling keeps; none where no group is ever dropped."""
    whitens: bool = False
    """True if advantages are whitened over all trained tokens."""
    taught: bool = False
    """True if what is asked as the reference is a teacher."""
    exact: bool = False
    """True if the loss asks for other tokens of a place than the one that was sampled."""
    barrier: bool = False
    """True if credit needs every group."""
    staleness: int = 0
    """Versions that the sampler may lag behind."""
    engine: str = "native"
    """What generates."""
    paged: bool = True
    """Whether caches grow with the answers, as vLLM's do; the native engine has room however long they become."""
    recorded: Recorded = "all"
    """Which decode steps GPUs replay from recordings."""
    nccl: bool = False
    """Whether GPUs hand gradients and weights on by NCCL."""
    price: float | None = None
    """Price of a GPU per hour."""
    seed: int = 0
    """Seed of the lengths that are drawn."""
    served: bool = False
    """Whether a server of the user's generates, and not the plan's devices."""
    unmade: tuple[str, ...] = ()
    """What of it nothing can execute yet, wherever it lies."""
    assumed: tuple[str, ...] = ()
    """What the recipe does not say, in words."""

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles of the step."""
        return frozenset(self.shapes)

    @property
    def engine_apart(self) -> bool:
        """True if the engine has processes and weights of its own on the devices of a plan."""
        return self.engine != "native" and not is_plugin(self.engine) and not self.served

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """What follows generation, in order; *old* before several updates, and before samplers lag behind."""
        old = {"old"} if self.several or self.staleness else set()
        return tuple(stage for stage in (*FORWARD, *UPDATE) if stage in self.roles | old)

    @cached_property
    def rule(self) -> RoundRule:
        """How many groups each round launches."""
        most = 1 if self.acceptance is None else self.max_rounds
        return RoundRule(groups=self.prompts, oversample=self.oversample, most=most)

    @cached_property
    def rounds(self) -> DrawnRounds:
        """The rounds of one step: the same for every plan."""
        return draw_rounds(self.rule, self.acceptance, seed=self.seed)

    @cached_property
    def launched(self) -> int:
        """Groups that are generated, in all rounds."""
        return len(self.rounds.kept)

    @cached_property
    def answers(self) -> int:
        """Answers that are generated."""
        return self.launched * self.samples

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that there may be."""
        return self.prompt + self.lengths.cap

    @cached_property
    def drawn(self) -> Counts:
        """The lengths of one step: the same for every plan, so that plans compare."""
        return self.lengths.sample(self.launched, self.samples, seed=self.seed)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(sum, self.drawn))

    @cached_property
    def load(self) -> TokenLoad:
        """What a stage computes of the groups that are trained on; prompts of a group once."""
        return TokenLoad.groups(self.prompt, tuple(self.drawn[index] for index in self.rounds.trained), shared=True)

    @cached_property
    def judged(self) -> TokenLoad:
        """What a stage computes of every group."""
        return TokenLoad.groups(self.prompt, self.drawn, shared=True)

    @property
    def several(self) -> bool:
        """True if a step makes more than one update."""
        return self.updates_a_step > 1

    @property
    def updates_a_step(self) -> int:
        """Updates of all epochs that are asked for."""
        return self.epochs * self.updates

    @cached_property
    def parts(self) -> int:
        """Updates that are made: at most one per answer in each epoch."""
        return self.epochs * max(1, min(self.updates, len(self.rounds.trained) * self.samples))

    def adapter_of(self, role: str) -> int:
        """Rank of the LoRA of what a role trains; 0 where that is all weights."""
        return self.critic_adapter if role in ("fit", "value") else self.adapter

    def optimizer_of(self, role: str) -> str:
        """What updates the model of a role."""
        return self.critic_optimizer if role == "fit" else self.optimizer

    def load_of(self, stage: str) -> TokenLoad:
        """What a stage computes in all. Reward models judge every group; updates share the answers of a group, so that
        its prompt is computed in each that has one of them."""
        if stage == "reward":
            return self.judged
        if stage not in UPDATE or not self.several:
            return self.load
        parts = self.parts / self.epochs
        again = parts * (1 - (1 - 1 / parts) ** self.samples) - 1
        prompts = TokenLoad.sequence(float(self.prompt), count=again * len(self.rounds.trained))
        once = replace(self.load, tokens=self.load.tokens + prompts.tokens, pairs=self.load.pairs + prompts.pairs)
        return once.part(float(self.epochs))

    def precision_of(self, stage: str) -> Precision:
        """How the weights of a stage's role are stored where they are not trained. An engine of its own has them as
        wide as it computes."""
        if stage == "generate" and self.engine_apart:
            return self.precision
        same = {"generate", "train"} if self.taught else {"generate", "train", "reference"}
        same |= {"fit", "value"} if self.critic_shares else set()
        return self.base if self.adapter and role_of(stage) in same else self.precision


def workload_of(recipe: Recipe, root: Path) -> StepWorkload:
    """The step of a recipe; raises a RecipeError with everything that keeps it from being planned."""
    if problems := list(_problems(recipe)):
        raise RecipeError(*problems)
    (prompt, lengths, acceptance, _), assumed = _sampled(recipe, root)
    shapes = _shapes(recipe, root)
    base: dict[str, Precision] = {"nf4": "nf4", "int8": "int8", "fp8": "fp8"}
    adapter, algorithm, batch = recipe.model.adapter, facts_of(recipe.algorithm.name), recipe.batch
    share, vllm = recipe.engine.memory_share, recipe.engine.kind == "vllm"
    shares = adapter and recipe.roles.reference == "adapter-off" and recipe.roles.teacher is None
    borrowed = {"generate"} | ({"reference"} if shares else set())
    borrowed |= {"value"} if "fit" in shapes else set()
    return StepWorkload(
        shapes=shapes,
        prompts=batch.prompts,
        samples=batch.samples,
        updates=batch.updates,
        epochs=batch.epochs,
        prompt=prompt,
        lengths=lengths,
        adapter=adapter.rank if adapter else 0,
        critic_adapter=critic.adapter.rank if (critic := recipe.roles.critic) and critic.adapter else 0,
        critic_shares=recipe.critic_shares_base,
        critic_optimizer=critic.optimizer.name if critic and critic.optimizer else "adamw",
        reading=frozenset(borrowed & shapes.keys()),
        precision=recipe.model.dtype,
        base=base.get(recipe.model.quantize, recipe.model.dtype),
        optimizer=recipe.optimizer.name,
        rounds_sums=recipe.optimizer.reduce == "bfloat16",
        recompute=None if recipe.optimizer.checkpointing == "auto" else recipe.optimizer.checkpointing,
        budget=None if batch.token_budget == "auto" else batch.token_budget,
        share=share if share != "auto" else CACHE_SHARE if vllm else None,
        oversample=batch.oversample,
        max_rounds=batch.max_rounds,
        acceptance=acceptance,
        whitens=algorithm.whitens,
        taught=recipe.roles.teacher is not None,
        exact=getattr(recipe.algorithm, "top_k", None) is not None,
        barrier=algorithm.scope == "batch",
        staleness=recipe.placement.staleness,
        engine=recipe.engine.kind,
        paged=vllm,
        recorded="all" if vllm else "alone" if getattr(recipe.engine, "graphs", True) else "none",
        nccl=recipe.placement.nccl,
        price=recipe.placement.price_per_gpu_hour,
        seed=recipe.seed,
        served=getattr(recipe.engine, "url", None) is not None,
        unmade=tuple(unmade(recipe, shapes)),
        assumed=(*assumed, *uncounted(recipe, shapes["train"])),
    )


def adapted(shape: ModelShape, adapter: Adapter | None, *, few_bits: bool) -> ModelShape:
    """A shape that knows where its adapter sits."""
    if adapter is None:
        return shape
    chosen = {"all-linear": None, "attention": ("attention",)}
    targets = chosen[adapter.targets] if isinstance(adapter.targets, str) else adapter.targets
    return replace(shape, adapted=targets, adapts_experts=not few_bits)


def _problems(recipe: Recipe) -> Iterator[Problem]:
    """What contradicts itself only where shapes and lengths are planned with."""
    if recipe.placement.cells is not None:
        reason = "cells by hand are not weighed against others; what is planned is placed by strategies"
        fix = "leave them out of what is planned; `stretto plan --cells FILE` prices them beside it"
        yield Problem(field="placement.cells", reason=reason, fix=fix)


def _shapes(recipe: Recipe, root: Path) -> dict[str, ModelShape]:
    """Role -> shape. A model that is asked for without name or shape is like the policy."""
    policy = shape_of_model(recipe.model, root, field="model")
    assert policy is not None  # a model has a name
    policy = adapted(policy, recipe.model.adapter, few_bits=recipe.model.in_few_bits)
    needs, roles = facts_of(recipe.algorithm.name).needs, recipe.roles

    def other(section: RoleModel, field: str) -> ModelShape:
        return (None if section.name == "scratch" else shape_of_model(section, root, field=field)) or policy

    shapes = {"generate": policy, "train": policy}
    if recipe.algorithm.kl.coef > 0 or "reference" in needs:
        told = roles.teacher or roles.reference
        field = "roles.teacher" if roles.teacher else "roles.reference"
        shapes["reference"] = other(told, field) if isinstance(told, RoleModel) else policy
    if roles.reward_model is not None:
        shapes["reward"] = replace(other(roles.reward_model, "roles.reward_model"), speaks=False)
    if roles.critic is not None:
        few_bits = recipe.critic_shares_base and recipe.model.in_few_bits
        critic = adapted(other(roles.critic, "roles.critic"), roles.critic.adapter, few_bits=few_bits)
        critic = replace(critic, speaks=False)
        shapes |= {"value": critic} if roles.critic.optimizer is None else {"value": critic, "fit": critic}
    return shapes


def _sampled(recipe: Recipe, root: Path) -> tuple[RecordedAnswers, tuple[str, ...]]:
    """Prompts, answers and how many groups are kept, and what of it nobody said."""
    told, longest = recipe.batch.lengths, recipe.engine.max_new_tokens
    assumed: list[str] = []
    if told is None:
        mean = max(1.0, ASSUMED_MEAN * longest)
        assumed.append(
            f"{LENGTHS_ASSUMED}: prompts of {ASSUMED_PROMPT} tokens, answers of {mean:g} on average, up to {longest} "
            "(batch.lengths says it better)"
        )
        lengths = LengthDistribution(mean=mean, sigma=ASSUMED_SIGMA, cap=longest)
        answers = RecordedAnswers(prompt=ASSUMED_PROMPT, lengths=lengths)
    elif told.from_run is not None:
        answers = recorded_answers(told.from_run, root, cap=longest)
    else:
        answers = RecordedAnswers(prompt=told.prompt, lengths=LengthDistribution.of(told.response))
    if not facts_of(recipe.algorithm.name).drops:
        return answers._replace(contrast=None), tuple(assumed)
    if answers.contrast is None:
        share, why = _acceptance(recipe.batch.oversample)
        answers = answers._replace(contrast=share)
        assumed.append(
            f"{share:.0%} of the groups are assumed to have a contrast, {why} "
            "(batch.lengths.from_run takes it from a run)"
        )
    return answers, tuple(assumed)


def _acceptance(oversample: float) -> tuple[float, str]:
    """The share of groups that are kept where no run says it, and why that much."""
    if oversample > 1:
        return 1 / oversample, f"because batch.oversample is {oversample:g}"
    return ASSUMED_ACCEPTANCE, "the others are dropped and others asked"
