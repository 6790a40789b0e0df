"""What is known of every algorithm without loading torch: for checks, plans and the objective in words.

The records with the mathematics are built by `stretto.algorithms.base.build`, which finds them through `module` here.
Adding an algorithm to stretto is a file beside this one and an entry below. One of a user's own, by module:name, says
its facts in its own file (`stretto.algorithms.own_facts`) and is known as long as this process runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stretto.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmFacts:
    """What checks and plans must know of an algorithm. The defaults are for those of a user's own."""

    name: str = ""
    """Name in recipes."""
    module: str = ""
    """Module that defines `build(section) -> Algorithm`."""
    summary: str = "An algorithm of one's own."
    """One sentence on what it is."""
    scope: Literal["sample", "group", "batch"] = "group"
    """How much must be scored before credit can be given."""
    min_samples: int = 1
    """Fewest samples per prompt that it is defined for."""
    clip: tuple[float, float] | None = (0.2, 0.2)
    """Default clip range, or none if it does not clip."""
    advantage: str = "A and L as its file has them"
    """The advantage as a formula."""
    surrogate: str = "L(rho, A)"
    """What is summed over tokens, with {low} and {high} for the clip range."""
    average: str = "its mean"
    """The denominator as a prefix of the formula."""
    constant: bool = False
    """True if sums are divided by `algorithm.constant`."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Extra streams it always needs."""
    regresses: bool = False
    """True for a regression that holds for answers of any policy, so that neither correction nor a KL term fits in."""
    turns: bool = False
    """True if it can give each turn credit of its own (`algorithm.credit`)."""
    whitens: bool = False
    """True if its advantages are whitened over all trained tokens, which a trainer may do with gradients instead."""
    taught: bool = False
    """True if what is asked as the reference is a teacher (`roles.teacher`)."""
    rows: Literal["prompts", "demonstrations", "pairs"] = "prompts"
    """What it learns from: answers to prompts, which are sampled, or what the rows of the task hold."""
    drops: bool = False
    """True if it leaves out groups that teach nothing, and samples again for others (`batch.max_rounds`)."""
    contrasts: bool | None = None
    """True if only differences of rewards within a group teach; left out, it is so of what needs several samples."""

    @property
    def learns_by_contrast(self) -> bool:
        """True if a group whose rewards are all equal teaches nothing."""
        return self.min_samples > 1 if self.contrasts is None else self.contrasts


PULLING = {"loss": "k2", "reward": "k1"}
"""Where a KL is -> the estimator that `auto` is there: the one whose expected gradient is that of the KL."""

ADAPTS = 0.2
"""How far off its target a KL counts as being at most, as a share of it, where the coefficient adapts: a step moves
it by so much, times the step's share of the horizon."""


def estimator_of(told: str, where: str) -> str:
    """The estimator that a recipe means by its `algorithm.kl.estimator`."""
    return PULLING[where] if told == "auto" else told


CLIPPED = "min(rho*A, clip(rho, 1-{low:g}, 1+{high:g})*A)"
"""The clipped surrogate that PPO introduced."""

CATALOG: dict[str, AlgorithmFacts] = {
    facts.name: facts
    for facts in (
        AlgorithmFacts(
            name="reinforce",
            module="stretto.algorithms.reinforce",
            summary="Williams' estimator: the reward itself is the advantage.",
            scope="sample",
            min_samples=1,
            clip=(0.2, 0.2),
            advantage="A = R",
            surrogate=CLIPPED,
            average="1/trajectories * sum over tokens",
            turns=True,
        ),
        AlgorithmFacts(
            name="rloo",
            module="stretto.algorithms.rloo",
            summary="REINFORCE with the mean of the other samples of the group as baseline.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.2),
            advantage="A = R - mean(R of the others in the group)",
            surrogate=CLIPPED,
            average="1/trajectories * sum over tokens",
            turns=True,
        ),
        AlgorithmFacts(
            name="grpo",
            module="stretto.algorithms.grpo",
            summary="Group-normalized rewards, mean over the tokens of an answer, then over answers.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.2),
            advantage="A = (R - mean(R of the group)) / (std(R of the group) + 1e-4)",
            surrogate=CLIPPED,
            average="1/conversations * sum over conversations of 1/length * sum over tokens",
            turns=True,
        ),
        AlgorithmFacts(
            name="dr_grpo",
            module="stretto.algorithms.dr_grpo",
            summary="GRPO without division by the deviation, and with one constant instead of each answer's length.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.2),
            advantage="A = R - mean(R of the group)",
            surrogate=CLIPPED,
            average="1/(trajectories * {constant}) * sum over tokens",
            turns=True,
            constant=True,
        ),
        AlgorithmFacts(
            name="multi_conv",
            module="stretto.algorithms.multi_conv",
            summary="One verdict for all conversations of a trajectory, centered in the group; mean over all tokens.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.2),
            advantage="A = R - mean(R of the group)",
            surrogate=CLIPPED,
            average="1/tokens * sum over tokens",
            turns=True,
        ),
        AlgorithmFacts(
            name="dapo",
            module="stretto.algorithms.dapo",
            summary="Clips higher upwards, means over all tokens, and replaces groups whose outcomes are all equal.",
            scope="group",
            min_samples=2,
            clip=(0.2, 0.28),
            advantage="A = (R - mean(R of the group)) / (std(R of the group) + 1e-4)",
            surrogate=CLIPPED,
            average="1/tokens * sum over tokens",
            turns=True,
            drops=True,
        ),
        AlgorithmFacts(
            name="gspo",
            module="stretto.algorithms.gspo",
            summary="GRPO with the ratio, and so the clipping, of the whole answer.",
            scope="group",
            min_samples=2,
            clip=(3e-4, 4e-4),
            advantage="A = (R - mean(R of the group)) / (std(R of the group) + 1e-4)",
            surrogate="min(s*A, clip(s, 1-{low:g}, 1+{high:g})*A), s = exp(mean over the answer's tokens of log rho)",
            average="1/conversations * sum over conversations of 1/length * sum over tokens",
            turns=True,
        ),
        AlgorithmFacts(
            name="cispo",
            module="stretto.algorithms.cispo",
            summary="Clips the importance weight, never a token's gradient; mean over all tokens.",
            scope="group",
            min_samples=2,
            clip=(1.0, 4.0),
            advantage="A = (R - mean(R of the group)) / (std(R of the group) + 1e-4)",
            surrogate="clip(rho, 1-{low:g}, 1+{high:g}) * A * lp, the clipped ratio without gradient",
            average="1/tokens * sum over tokens",
            turns=True,
        ),
        AlgorithmFacts(
            name="reinforce_pp",
            module="stretto.algorithms.reinforce_pp",
            summary="Returns per token, whitened over the whole batch.",
            scope="batch",
            min_samples=1,
            clip=(0.2, 0.2),
            advantage="A = (return - mean(returns of the batch)) / std(returns of the batch)",
            surrogate=CLIPPED,
            average="1/tokens * sum over tokens",
            whitens=True,
        ),
        AlgorithmFacts(
            name="ppo",
            module="stretto.algorithms.ppo",
            summary="A critic's values as baseline of every token; the critic learns beside the policy.",
            scope="batch",
            min_samples=1,
            clip=(0.2, 0.2),
            advantage="A = (GAE - mean(GAEs of the batch)) / std(GAEs of the batch)",
            surrogate=CLIPPED,
            average="1/tokens * sum over tokens",
            needs=frozenset({"values"}),
            whitens=True,
        ),
        AlgorithmFacts(
            name="distill",
            module="stretto.algorithms.distill",
            summary="On-policy distillation: the reverse KL of each token from a teacher, beside rewards if wanted.",
            scope="group",
            min_samples=1,
            clip=(0.2, 0.2),
            advantage="A = log p_teacher - lp of each token",
            surrogate=CLIPPED,
            average="1/tokens * sum over tokens",
            needs=frozenset({"reference"}),
            taught=True,
        ),
        AlgorithmFacts(
            name="astar_po",
            module="stretto.algorithms.astar_po",
            summary="Regression on how much better than V* an answer was, V* made before training from the reference.",
            scope="sample",
            min_samples=1,
            clip=None,
            advantage="A = R - V*",
            surrogate="-(beta2*D - A)^2",
            average="1/trajectories * sum over trajectories",
            needs=frozenset({"reference", "vstar"}),
            regresses=True,
        ),
        AlgorithmFacts(
            name="astar_po_course",
            module="stretto.algorithms.astar_po_course",
            summary="A course report's variant, for comparison: log-likelihood weighted by R - the best reward seen.",
            scope="sample",
            min_samples=1,
            clip=None,
            advantage="A = R - V*",
            surrogate="A * lp",
            average="1/conversations * sum over conversations of 1/length * sum over tokens",
            needs=frozenset({"vstar"}),
        ),
        AlgorithmFacts(
            name="sft",
            module="stretto.algorithms.sft",
            summary="Supervised fine-tuning: the answers of the data are imitated, and nothing is sampled.",
            scope="sample",
            clip=None,
            advantage="lp = log-probability of a token of an answer, the end of its turn included",
            surrogate="lp",
            average="1/tokens * sum over tokens",
            rows="demonstrations",
        ),
        AlgorithmFacts(
            name="reward_model",
            module="stretto.algorithms.reward_model",
            summary="Trains a reward model: of two answers the better one gets the higher score (Bradley-Terry).",
            scope="sample",
            clip=None,
            advantage="s = score of a conversation; margin = the pair's, 0 where the data has none",
            surrogate="log sigmoid(s of the better - s of the worse - margin)",
            average="1/pairs * sum over pairs",
            rows="pairs",
        ),
    )
}
"""Every algorithm that can be named in a recipe."""

OWN: dict[str, AlgorithmFacts] = {}
"""module:name -> the facts of algorithms that recipes of this process have named."""


def find_facts(name: str) -> AlgorithmFacts | None:
    """What is known of an algorithm, or none if there is no such one."""
    return CATALOG.get(name) or OWN.get(name)


def learns_from_rows(name: str) -> bool:
    """True for an algorithm that learns from the rows of a task as they are; nothing is sampled to learn from."""
    facts = find_facts(name)
    return facts is not None and facts.rows != "prompts"


def trains_reward_model(name: str) -> bool:
    """True for an algorithm whose model says how good an answer is, and gives none itself."""
    facts = find_facts(name)
    return facts is not None and facts.rows == "pairs"


def facts_of(name: str) -> AlgorithmFacts:
    """What is known of an algorithm. RecipeError if there is no such one."""
    found = find_facts(name)
    if found is None:
        fix = f"use one of {', '.join(CATALOG)}, or module:name"
        raise RecipeError.of("algorithm.name", f"there is no algorithm {name!r}", fix)
    return found
