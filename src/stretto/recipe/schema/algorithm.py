"""The section `algorithm`: how a reward becomes a gradient.

Each family of algorithms is a record with the keys that act in it. What else is known of them (their advantage, the
range that they clip to) is `algorithms.catalog`'s, which also knows those by module:name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, NotNegative, Positive, Section


class AdaptiveKl(Section):
    """A coefficient that moves until the KL is what is wanted."""

    target: Positive = 0.1
    """The KL per token to hold, as `kl/reference` reports it."""
    horizon: Count = 10_000
    """Trajectories after which a KL of at least 1.2 times the target has raised the coefficient by about a fifth."""


class Kl(Section):
    """The pull towards the reference."""

    coef: NotNegative = 0.0
    """Weight; 0 switches the reference off."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """k1 = log-ratio, k2 = its half square, k3 = exp(u) - 1 - u; auto: k2 in the loss and k1 in the reward, whose
    expected gradients pull to the reference."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a part of the reward."""
    adaptive: AdaptiveKl | None = None
    """Moves `coef`, which is then where it begins, after every step; for a KL in the reward."""


class Correction(Section):
    """Importance weights of the trainer's against the engine's probabilities."""

    kind: Literal["none", "token", "sequence", "geometric"] = "token"
    """What is weighted: each token, each conversation by its product, or by its geometric mean."""
    cap: Annotated[float, Field(ge=1.0)] = 2.0
    """Weights above are truncated to it."""


class Vstar(Section):
    """The optimal value A*PO regresses on."""

    samples: Count = 8
    """Reference answers per prompt."""
    beta1: NotNegative = 0.5
    """Temperature of the log-mean-exp."""
    beta2: Positive = 0.001
    """Weight of the log-ratio in the regression."""
    table: str = "auto"
    """A file, or `auto` to find it by what it was made from."""


class Gae(Section):
    """Generalised advantage estimation and the loss of the critic that it reads (PPO)."""

    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Lambda: 1 trusts rewards alone, 0 the critic's next value."""
    length_alpha: Positive | None = None
    """Lambda of the policy by length instead: 1 - 1 / (length_alpha * trained tokens of the trajectory), at least 0."""
    critic_lam: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Lambda of what the critic learns to say; null: `lam`."""
    value_clip: Positive = 0.2
    """How far the critic may move from the value it gave when the answer was sampled."""


class AlgorithmSection(Choice):
    """How a reward becomes a gradient."""

    told_by: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    """Which algorithm."""
    kl: Kl = Kl()
    """The pull towards the reference."""
    correction: Correction = Correction()
    """Engine against trainer."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """What a reward is given to: all of a trajectory, or each turn, with what its environment says turns are worth."""


class ClippedAlgorithm(AlgorithmSection):
    """What algorithms with a clipped ratio share."""

    clip: tuple[NotNegative, NotNegative] | None = None
    """How far the ratio may fall and rise, (0.2, 0.2) for most; inactive while a step makes one update
    (`batch.updates`, `batch.epochs`) and `placement.staleness` is 0."""


class PolicyGradient(ClippedAlgorithm):
    """Policy gradients without numbers of their own."""

    name: Literal["grpo", "reinforce", "rloo", "dapo", "gspo", "cispo", "reinforce_pp"] = "grpo"


class DrGrpo(ClippedAlgorithm):
    """GRPO with one constant instead of lengths and deviations."""

    name: Literal["dr_grpo"] = "dr_grpo"
    constant: Count | None = None
    """What the sum over an answer's tokens is divided by; default: engine.max_new_tokens."""


class MultiConv(ClippedAlgorithm):
    """One verdict for all conversations of a trajectory."""

    name: Literal["multi_conv"] = "multi_conv"
    average: Literal["token", "trajectory"] = "token"
    """What weighs the same in the mean."""


class Ppo(ClippedAlgorithm):
    """A critic's values as baseline of every token."""

    name: Literal["ppo"] = "ppo"
    gae: Gae = Gae()
    """How values become advantages."""


class Distill(ClippedAlgorithm):
    """A teacher's word on every token that the policy samples; `roles.teacher` names it."""

    name: Literal["distill"] = "distill"
    top_k: Count | None = None
    """null: the teacher is asked about the sampled token alone. A number: the exact KL over its so many likeliest."""
    reward_weight: NotNegative = 0.0
    """Weight of the rewards, centred in the group, beside the teacher; 0: they are only reported, and none need be."""


class AstarPo(AlgorithmSection):
    """Regression on a table of optimal values; nothing is clipped."""

    name: Literal["astar_po", "astar_po_course"] = "astar_po"
    vstar: Vstar = Vstar()
    """The table."""


class Imitation(AlgorithmSection):
    """The answers of the data are imitated; nothing is sampled (`stretto sft`)."""

    name: Literal["sft"] = "sft"


class PairwiseRanking(AlgorithmSection):
    """A reward model, from pairs of a better and a worse answer (`stretto reward-model`)."""

    name: Literal["reward_model"] = "reward_model"
    centring: NotNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0; 0.01 is usual."""


class OwnAlgorithm(ClippedAlgorithm):
    """A function of yours that builds an algorithm. `FACTS` in its file say which of these keys act."""

    name: Given
    constant: Count | None = None
    """What sums over tokens are divided by."""
    vstar: Vstar | None = None
    """The table of optimal values."""
    gae: Gae | None = None
    """How values become advantages."""
