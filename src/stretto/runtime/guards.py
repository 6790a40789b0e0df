"""When a run should stop rather than go on: every guard of the recipe, one function each."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.errors import GuardError, RewardError, TrainingError
from stretto.recipe.schema import Guards
from stretto.rewards.score import TOO_SMALL, Scored

FEW = 0.02
"""A share of tokens below which it is single ones that differ, and not the distribution."""


WAY_ON = (
    "\n    fix: correct what failed and resume the run, with --allow environment.kind or --allow rewards where a file "
    "of yours changed; or raise guards.reward_error_share to go on without such answers"
)
"""What to do about answers without a verdict."""


def reward_errors(section: Guards, scored: Scored, *, launched: int) -> None:
    """Stops when too large a share of a step has no verdict, and shows the first reason."""
    failures = [trajectory for trajectory in scored.failed if trajectory.failure != TOO_SMALL]
    if failures and (len(failures) > section.reward_error_share * launched or not scored.groups):
        raise RewardError(
            f"{len(failures)} of {launched} trajectories of this step have no verdict, more than "
            f"guards.reward_error_share ({section.reward_error_share:g}) allows. The first one "
            f"(prompt {failures[0].prompt.id}, attempt {failures[0].attempt}):\n{failures[0].failure}{WAY_ON}"
        )


def evaluation_errors(section: Guards, scored: Scored, *, launched: int) -> None:
    """Stops when so many answers of an evaluation have no verdict that the others say little of the whole."""
    failures = scored.failed
    if not failures or (len(failures) <= section.reward_error_share * launched and scored.groups):
        return
    first = f"The first one (prompt {failures[0].prompt.id}):\n{failures[0].failure}"
    if not scored.groups:
        told = f"evaluation: none of {launched} answers has a verdict, so there is no accuracy. {first}"
        raise RewardError(f"{told}{WAY_ON}")
    raise RewardError(
        f"evaluation: {len(failures)} of {launched} answers have no verdict, more than guards.reward_error_share "
        f"({section.reward_error_share:g}) allows; an accuracy over the others would be that of other prompts. "
        f"{first}{WAY_ON}"
    )


def finite(
    section: Guards, metrics: Mapping[str, float], *, step: int, suspects: Sequence[tuple[str, int, int, int]] = ()
) -> None:
    """Stops on a loss or gradient that is no number, of which no update was made; names the samples it comes from."""
    if metrics["updates/skipped"] and section.non_finite == "stop":
        named = "; ".join(f"prompt {p}, visit {v}, attempt {a}, conversation {c}" for p, v, a, c in suspects)
        told = f"it comes from {named}; " if named else ""
        raise TrainingError(
            f"train: step {step} is not finite ({_loss(metrics)}); {told}"
            "lower optimizer.lr, or set guards.non_finite: skip"
        )


def _loss(metrics: Mapping[str, float], whose: str = "") -> str:
    """Loss and gradient norm of the policy, and those of a critic that is trained."""
    told = "loss {}, gradient norm {}".format(*(metrics[f"{whose}{name}"] for name in ("loss", "grad_norm")))
    more = "" if whose or "critic/loss" not in metrics else "; of the critic " + _loss(metrics, "critic/")
    return told + more


def after_step(section: Guards, metrics: Mapping[str, float]) -> None:
    """Stops on numbers that say the run has left the rails; one that is no number at all says so too."""
    k3 = metrics.get("kl/engine_trainer", 0.0)
    if section.max_k3 is not None and not k3 <= section.max_k3:
        raise GuardError(
            f"engine and trainer disagree: mean k3 is {k3:.3g}, above guards.max_k3 ({section.max_k3:g}); "
            f"{_likely_cause(metrics.get('engine_trainer/outside'))}"
        )
    entropy = metrics.get("entropy")
    if section.min_entropy is not None and entropy is not None and not entropy >= section.min_entropy:
        raise GuardError(f"entropy is {entropy:.3g}, below guards.min_entropy ({section.min_entropy:g})")


def _likely_cause(outside: float | None) -> str:
    """What makes the engine's probabilities others than the trainer's, by how many of them are at least twice or half
    as large."""
    if outside is None or not 0 <= outside <= 1:
        return "the sampler does not compute what is trained, or dtype and temperature make it too noisy"
    told = f"{outside:.2%} of the tokens are more than twice or less than half as likely to one of them"
    if outside < FEW:
        return (
            f"{told}: few, and far off, as rounding makes rare tokens, and routers that choose other experts; try "
            "model.dtype: float32, engine.router_replay for a mixture, or a lower engine.temperature"
        )
    return (
        f"{told}: the whole distribution is another, as with other weights, another temperature, or a cache or base in "
        "few bits; `stretto replay` on this step says what the trainer computes"
    )


def free_disk(section: Guards, folder: Path) -> None:
    """Refuses to start, or to write a checkpoint, where it may not fit. The folder need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    if free < section.min_disk_gb:
        raise GuardError(
            f"{there}: {free:.1f} GB free, less than guards.min_disk_gb ({section.min_disk_gb:g}); "
            "make room, then start or resume"
        )
