"""Section `algorithm`: one record per family of algorithms, with the keys that act in it.

`algorithms.catalog` holds the remaining facts (advantage, default clip range), also for algorithms by module:name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, NotNegative, Positive, Section


class AdaptiveKl(Section):
    """Controller that adjusts the KL coefficient toward a target KL."""

    target: Positive = 0.1
    """Target KL per token, as reported by `kl/reference`."""
    horizon: Count = 10_000
    """Trajectories after which a KL of at least 1.2 times the target raises the coefficient by about 20 %."""


class Kl(Section):
    """KL penalty toward the reference policy."""

    coef: NotNegative = 0.0
    """KL coefficient; 0 disables the reference policy."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """KL estimator: k1 = log-ratio, k2 = half its square, k3 = exp(u) - 1 - u. auto: k2 in the loss, k1 in the
    reward."""
    where: Literal["loss", "reward"] = "loss"
    """KL as a loss term or as a part of the reward."""
    adaptive: AdaptiveKl | None = None
    """Adaptive KL coefficient, starting at `coef`; for a KL in the reward."""


class Correction(Section):
    """Importance weights for the mismatch between trainer and engine probabilities."""

    kind: Literal["none", "token", "sequence", "geometric"] = "token"
    """Unit of the weights: each token, each conversation (product), or its geometric mean."""
    cap: Annotated[float, Field(ge=1.0)] = 2.0
    """Max importance weight; larger weights are truncated."""


class Vstar(Section):
    """Table of optimal values V* for A*PO."""

    samples: Count = 8
    """Completions of the reference per prompt."""
    beta1: NotNegative = 0.5
    """Temperature of the log-mean-exp over reference rewards."""
    beta2: Positive = 0.001
    """Weight of the log-ratio in the regression."""
    table: str = "auto"
    """File with the table. `auto` finds the one that `stretto value` wrote for this recipe."""


class Gae(Section):
    """Generalized advantage estimation and the critic's loss (PPO)."""

    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount factor per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """GAE lambda: 1 uses rewards alone, 0 the critic's next value."""
    length_alpha: Positive | None = None
    """Length-adaptive lambda of the policy: 1 - 1 / (length_alpha * trained tokens of the trajectory), at least 0.
    Unset: `lam`."""
    critic_lam: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """GAE lambda for the critic's targets. Unset: `lam`."""
    value_clip: Positive = 0.2
    """Max change of a value from its value at sampling time, before the loss is clipped."""


class AlgorithmSection(Choice):
    """Algorithm and its settings."""

    told_by: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    """Algorithm name."""
    kl: Kl = Kl()
    """KL penalty toward the reference policy."""
    correction: Correction = Correction()
    """Importance weights for the engine-trainer mismatch."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Unit of credit: the whole trajectory, or each turn by the turn rewards of its environment."""


class ClippedAlgorithm(AlgorithmSection):
    """Keys that algorithms with a clipped probability ratio share."""

    clip: tuple[NotNegative, NotNegative] | None = None
    """Max decrease and increase of the probability ratio. Unset: the algorithm's default, mostly [0.2, 0.2]. Inactive
    with one update per step and staleness 0."""


class PolicyGradient(ClippedAlgorithm):
    """Policy gradients without further keys."""

    name: Literal["grpo", "reinforce", "rloo", "dapo", "gspo", "cispo", "reinforce_pp"] = "grpo"


class DrGrpo(ClippedAlgorithm):
    """GRPO with a constant normalizer instead of lengths and standard deviations."""

    name: Literal["dr_grpo"] = "dr_grpo"
    constant: Count | None = None
    """Divisor of the sum over completion tokens. Unset: engine.max_new_tokens."""


class MultiConv(ClippedAlgorithm):
    """One score for all conversations of a trajectory."""

    name: Literal["multi_conv"] = "multi_conv"
    average: Literal["token", "trajectory"] = "token"
    """Unit of the loss average: tokens or trajectories."""


class Ppo(ClippedAlgorithm):
    """PPO with a critic's values as the baseline of every token."""

    name: Literal["ppo"] = "ppo"
    gae: Gae = Gae()
    """Advantage estimation."""


class Distill(ClippedAlgorithm):
    """On-policy distillation from `roles.teacher`."""

    name: Literal["distill"] = "distill"
    top_k: Count | None = None
    """Exact KL over the teacher's k most likely tokens. `null`: the sampled token alone."""
    reward_weight: NotNegative = 0.0
    """Weight of the group-centered reward next to the teacher's term. 0: rewards are reported and may be omitted."""


class AstarPo(AlgorithmSection):
    """A*PO: regression on a table of optimal values, without clipping."""

    name: Literal["astar_po", "astar_po_course"] = "astar_po"
    vstar: Vstar = Vstar()
    """Table of optimal values."""


class Imitation(AlgorithmSection):
    """Supervised fine-tuning on answers in the data (`stretto sft`)."""

    name: Literal["sft"] = "sft"


class PairwiseRanking(AlgorithmSection):
    """Reward model trained on preference pairs (`stretto reward-model`)."""

    name: Literal["reward_model"] = "reward_model"
    centring: NotNegative = 0.0
    """Weight of the squared sum of a pair's scores, which centers scores at 0; typically 0.01."""


class OwnAlgorithm(ClippedAlgorithm):
    """Algorithm of your own: a function that builds it. `FACTS` in its file declares which keys act."""

    name: Given
    constant: Count | None = None
    """Divisor of sums over tokens."""
    vstar: Vstar | None = None
    """Table of optimal values."""
    gae: Gae | None = None
    """Advantage estimation."""
