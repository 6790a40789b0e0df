"""What is wrong with a run while it runs, in lines that name the cause and what to change; nothing for a healthy one.

Each rule is a pure function over the newest steps. A line is told when its rule begins to hold, and again only after it
has not held for some steps. Thresholds were set so that the shipped recipes give no line and runs made sick on purpose
give theirs (tests/runtime/test_diagnosis.py). Metrics are read and never changed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from stretto.recipe.schema import Recipe
from stretto.report.step_facts import StepFacts, facts_of

KEPT = 40
"""Steps that rules look back over."""

SHORT, LONG = 3, 5
"""Steps that a clear sign, and one that noise could make, must last."""

ENDED = 3
"""Steps without it after which an episode is over."""

CUT_OFF, NONE_ENDS = 0.25, 0.95
"""Share of answers cut off that is too large, and the share at which hardly any ends by itself."""

DEAD = 0.6
"""Share of groups without a contrast that is too large where nothing improves."""

EVEN = 0.5
"""Mean share of full marks above which most groups without a contrast are right ones."""

SOLVED = 0.8
"""Mean share of full marks above which groups without a contrast are a success."""

MARKED = 0.3
"""Share of answers with turns of others in them, or that run on behind the right answer, that is no chance."""

SURE = 4.0
"""Standard errors by which a mean must have moved."""

COLLAPSED = 10.0
"""By how much the entropy falls in a collapse, within the steps that are looked back over."""

SOON = 10
"""Steps within which a fall of the held-out accuracy is blamed on the learning rate."""

FELL = "accuracy"
"""Name of the rule that reads evaluations."""

LONGER, FOLLOWS = 1.3, 0.5
"""Growth of answers, and correlation of a part with their length, that tell of a reward hacked by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRecipe:
    """What rules need to know of a recipe."""

    samples: int
    """Answers to each prompt."""
    max_new_tokens: int
    """Longest answer of one call."""
    lr: float
    """Peak learning rate."""
    judging: tuple[str, ...]
    """Parts of the reward that say of an answer that it is right, with a positive weight."""
    has_template: bool = True
    """False for a scratch model, which learns the one way in which its chats are written."""

    @classmethod
    def of(cls, recipe: Recipe) -> WatchedRecipe:
        """Of a resolved recipe."""
        return cls(
            samples=recipe.batch.samples,
            max_new_tokens=recipe.engine.max_new_tokens,
            lr=recipe.optimizer.peak,
            judging=tuple(part.name for part in recipe.rewards if part.judges and part.weight > 0),
            has_template=recipe.model.name != "scratch",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out accuracy after a step, with its interval."""

    step: int
    """Number of the step; 0 before the first."""
    accuracy: float
    """Share of the prompts that were answered right."""
    low: float
    """Lower end of the 95 % interval."""
    asked: float
    """Number of prompts."""

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any]) -> HeldOut | None:
        """Return the evaluation in the metrics of a step, or `None` if there was none."""
        told = [metrics.get(f"eval/{name}") for name in ("accuracy", "low", "asked")]
        if not all(isinstance(value, int | float) for value in told):
            return None
        accuracy, low, asked = told
        return cls(step=step, accuracy=accuracy, low=low, asked=asked)  # type: ignore[arg-type]


Rule = Callable[[Sequence[StepFacts], WatchedRecipe], str | None]


class Diagnosis:
    """Watches a run step by step."""

    def __init__(
        self, recipe: Recipe, turn_tokens: Set[int] = frozenset(), written: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """`turn_tokens` are as in `facts_of`; `written` are the lines of metrics.jsonl before a resume."""
        self._turn_tokens = turn_tokens
        self._about = WatchedRecipe.of(recipe)
        self._facts: deque[StepFacts] = deque(maxlen=KEPT)
        self._silent: dict[str, int] = {}
        self._held_out: deque[HeldOut] = deque(maxlen=KEPT)
        for row in written:
            self.evaluated(int(row["step"]), row)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the held-out accuracy of a step, if its metrics hold one."""
        if (found := HeldOut.of(step, metrics)) is not None:
            self._held_out.append(found)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        rows: Sequence[Mapping[str, Any]],
        *,
        warned: Set[str] = frozenset(),
    ) -> dict[str, str]:
        """After a step: name of each rule that began to hold -> what to tell. What guards have `warned` of is told."""
        self._facts.append(facts_of(step, metrics, rows, self._turn_tokens))
        self.evaluated(step, metrics)
        by_guards = {GUARDED[guard] for guard in warned if guard in GUARDED}
        holding = diagnose(tuple(self._facts), self._about, self._silent.keys() | by_guards, tuple(self._held_out))
        for name in by_guards - self._silent.keys():
            holding.pop(name, None)
        for name in list(self._silent):
            self._silent[name] = 0 if name in holding else self._silent[name] + 1
            if self._silent[name] >= ENDED:
                del self._silent[name]
        begun = {name: text for name, text in holding.items() if name not in self._silent}
        self._silent |= dict.fromkeys(begun, 0)
        return begun

    def has_told(self, guard: str) -> bool:
        """True if a line that was told, and whose cause is not over, says what this guard warns of."""
        return GUARDED.get(guard) in self._silent


def diagnose(
    facts: Sequence[StepFacts],
    about: WatchedRecipe,
    told: Set[str] = frozenset(),
    held_out: Sequence[HeldOut] = (),
) -> dict[str, str]:
    """Every rule that holds after the last of these steps; what is only a consequence of another, or of one that was
    `told`, is left out."""
    found: dict[str, str] = {}
    if (text := accuracy_fell(held_out, about)) is not None and "rate" not in told:
        found[FELL] = text
    for name, (rule, causes) in RULES.items():
        if not (found.keys() | told) & causes and (text := rule(facts, about)) is not None:
            found[name] = text
    return found


# Rules ----------------------------------------------------------------------------------------------------------------


def accuracy_fell(held_out: Sequence[HeldOut], about: WatchedRecipe) -> str | None:
    """Held-out accuracy of the newest evaluation lies below the interval of one at most `SOON` steps before."""
    now = held_out[-1:]
    before = [each for each in held_out[:-1] if each.asked == now[0].asked and now[0].step - each.step <= SOON]
    best = max(before, key=lambda each: each.low, default=None)
    if best is None or now[0].accuracy >= best.low or about.lr == 0:
        return None
    return (
        f"held-out accuracy fell from {best.accuracy:.2f} (step {best.step}) to {now[0].accuracy:.2f}, below its "
        f"interval (from {best.low:.2f}): optimizer.lr={about.lr:g} is probably too high; try a third of it"
    )


def rate_too_high(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """The reward fell far below what it was while the gradient, the entropy or the distance to the reference jumped."""
    # Nobody judges where rows are learned from, or a teacher alone, of whom a policy may well become surer.
    if not all("reward/mean" in fact.metrics for fact in facts):
        return None
    if (collapse := _collapse(facts)) is not None:
        return f"{collapse}: optimizer.lr={about.lr:g} is probably too high; try a third of it"
    if len(facts) <= SHORT:
        return None
    before, now = facts[:-SHORT], facts[-SHORT:]
    best = max(before, key=lambda fact: fact.metrics.get("reward/mean", -math.inf))
    top, left = best.metrics.get("reward/mean", 0.0), _mean(now, "reward/mean")
    if top - left <= max(SURE * _error([best], now), 0.5 * abs(top)):
        return None
    signs = []
    was, entropy = max(_mean(before[:SHORT], "entropy"), 1e-3), _mean(now, "entropy")
    if not was / 3 <= entropy <= 1.5 * was:
        signs.append(f"the entropy went from {was:.2g} to {entropy:.2g}")
    if all(_is_dead(fact, about) for fact in now) and not all(_is_dead(fact, about) for fact in before):
        signs.append("all answers to a prompt became alike")
    norms = [fact.metrics["grad_norm"] for fact in facts if "grad_norm" in fact.metrics]
    usual = median(norms) if norms else 0.0
    if usual > 0 and max(norms) >= 5 * usual:
        signs.append(f"the gradient norm jumped to {max(norms):.2g} (median {usual:.2g})")
    distances = [fact.metrics["kl/reference"] for fact in facts if "kl/reference" in fact.metrics]
    if len(distances) > SHORT and distances[-1] > max(0.05, 5 * median(distances)):
        signs.append(f"the KL to the reference jumped to {distances[-1]:.2g}")
    if not signs:
        return None
    return (
        f"the reward fell from {top:.2f} (step {best.step}) to {left:.2f} and {' and '.join(signs)}: "
        f"optimizer.lr={about.lr:g} is probably too high; try a third of it"
    )


def _collapse(facts: Sequence[StepFacts]) -> str | None:
    """The entropy fell to nearly nothing within a few steps, and most answers are not right."""
    if len(facts) <= SHORT:
        return None
    was, now = facts[0].metrics.get("entropy", 0.0), facts[-2:]
    right = _mean(now, "reward/outcome")
    if _mean(now, "entropy") > was / COLLAPSED or was <= 0 or right >= SOLVED:
        return None
    steps = facts[-1].step - facts[0].step
    return (
        f"the entropy went from {was:.2g} to {_mean(now, 'entropy'):.2g} in {steps} steps, at a reward of {right:.2f}"
    )


def template_is_wrong(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """The model writes turns of others, or the right answer and then goes on, and hardly ever ends by itself."""
    now = facts[-SHORT:]
    if not about.has_template or len(now) < SHORT or not all(fact.answers for fact in now):
        return None
    marked, ran_on = (fmean(getattr(fact, name) for fact in now) for name in ("marked", "ran_on"))
    told = ""
    if min(fact.marked for fact in now) >= MARKED:
        told = f"{marked:.0%} of answers hold marks of other turns"
    elif min(fact.unended for fact in now) >= NONE_ENDS and min(fact.ran_on for fact in now) >= MARKED:
        told = f"no answer ends by itself, and {ran_on:.0%} go on behind the right answer"
    if not told:
        return None
    return (
        f"{told}: the chat template does not suit the model (task.chat_template, task.template); "
        "`stretto samples RUN --full` shows what it reads and writes"
    )


def cut_off(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """Many answers reach the token limit, and not fewer and fewer."""
    now = facts[-LONG:]
    shares = [fact.metrics.get("length/truncated", 0.0) for fact in now]
    if len(now) < LONG or min(shares) < CUT_OFF or shares[-1] < 0.8 * shares[0]:
        return None
    calls = [length for fact in now for length in fact.cut_calls]
    shorter = [length for length in calls if length < about.max_new_tokens]
    if len(shorter) > len(calls) / 2:
        return (
            f"{fmean(shares):.0%} of answers are cut off at {max(shorter)} tokens or fewer, below "
            f"engine.max_new_tokens={about.max_new_tokens}: the environment asks for so few (max_new_tokens of its "
            "calls, environment.memory_tokens), or the context has no room for more; raise it there"
        )
    told = f"{fmean(shares):.0%} of answers hit engine.max_new_tokens={about.max_new_tokens}: raise it"
    if min(fact.unended for fact in now) >= NONE_ENDS:
        told += "; if they still do not end, the chat template does not suit the model (task.chat_template)"
    return told


def nothing_is_taught(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """No group has had a contrast for some steps, and that is no success."""
    now = facts[-SHORT:]
    if len(now) < SHORT or not all(_is_dead(fact, about) for fact in now):
        return None
    outcome = _mean(now, "reward/outcome")
    if outcome >= SOLVED:
        return None
    told = f"no group taught anything for {SHORT} steps"
    if outcome <= 0:
        return (
            f"{told}: no answer was right; easier prompts, a model that is right now and then, or a reward that gives "
            "part of the credit"
        )
    return f"{told}: the answers to each prompt are alike; a higher engine.temperature, other prompts or more samples"


def few_groups_teach(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """Most groups have no contrast, and the reward does not rise."""
    now, before = facts[-LONG:], facts[-2 * LONG : -LONG]
    if about.samples < 2 or len(before) < LONG or _mean(now, "reward/outcome") >= EVEN:
        return None
    groups, dead = sum(_groups(fact, about) for fact in now), sum(f.metrics.get("groups/dead", 0.0) for f in now)
    rises = _mean(now, "reward/mean") - _mean(before, "reward/mean") > _error(before, now)
    if not groups or dead / groups < DEAD or rises:
        return None
    return (
        f"{dead / len(now):.0f} of {groups / len(now):.0f} groups taught nothing in each of the last {LONG} steps: "
        "easier prompts or more samples"
    )


def part_never_earned(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """One of several parts of the reward was 0 for every answer so far."""
    if len(facts) < LONG or len(about.judging) < 2:
        return None
    never = []
    for name in about.judging:
        earned = [fact.metrics.get(f"reward/part/{name}") for fact in facts]
        if earned[-1] is not None and all(value in (0.0, None) for value in earned):
            never.append(name)
    answers = sum(fact.answers for fact in facts)
    if not never or len(never) == len(about.judging):
        return None
    return (
        f"{' and '.join(never)} {'was' if len(never) == 1 else 'were'} never earned in {answers} answers: ask for it "
        "in the prompt, or see with `stretto task check` whether the reward knows it"
    )


def length_is_rewarded(facts: Sequence[StepFacts], about: WatchedRecipe) -> str | None:
    """Reward and length rise together, a part follows the length, and what the task asks for does not get better."""
    third = len(facts) // 3
    if third < SHORT:
        return None
    before, now = facts[:third], facts[-third:]
    rise = _mean(now, "reward/mean") - _mean(before, "reward/mean")
    grown = _mean(now, "length/mean") / max(_mean(before, "length/mean"), 1e-9)
    if rise <= SURE * _error(before, now) or grown < LONGER:
        return None
    follows = {
        name: fmean(fact.follows_length[name] for fact in now if name in fact.follows_length)
        for name in {name for fact in now for name in fact.follows_length}
    }
    name = max(follows, key=lambda each: follows[each], default=None)
    if name is None or follows[name] < FOLLOWS:
        return None
    flat = _flat(before, now, about, name) or _accuracy_is_flat(facts)
    if not flat:
        return None
    return (
        f"the reward rises with the length of answers ({_mean(before, 'length/mean'):.0f} to "
        f"{_mean(now, 'length/mean'):.0f} tokens; {name} follows it) while {flat}: the reward is hacked by length; "
        "take length out of it, or add a part of kind overlong"
    )


RULES: dict[str, tuple[Rule, frozenset[str]]] = {
    "rate": (rate_too_high, frozenset({FELL})),
    "template": (template_is_wrong, frozenset({"rate"})),
    "length": (length_is_rewarded, frozenset({"rate", FELL})),
    "cut_off": (cut_off, frozenset({"rate", FELL, "template", "length"})),
    "dead": (nothing_is_taught, frozenset({"rate", FELL, "template", "cut_off"})),
    "few": (few_groups_teach, frozenset({"rate", FELL, "template", "cut_off", "dead"})),
    "part": (part_never_earned, frozenset({"rate", FELL, "template", "cut_off", "dead"})),
}
"""Name -> the rule, and the rules whose line makes its own needless."""

GUARDED = {"reward_collapse": "rate", "entropy_collapse": "rate"}
"""Guard of the recipe that warns of a slow drift -> the rule that would say the same."""


# Between them ---------------------------------------------------------------------------------------------------------


def _mean(facts: Sequence[StepFacts], name: str) -> float:
    return fmean(fact.metrics.get(name, 0.0) for fact in facts)


def _error(*sides: Sequence[StepFacts]) -> float:
    """Standard error of the difference of two mean rewards."""
    total = 0.0
    for facts in sides:
        spread = fmean(fact.metrics.get("reward/std", 0.0) ** 2 for fact in facts)
        total += spread / max(1, sum(fact.answers for fact in facts))
    return math.sqrt(total)


def _groups(fact: StepFacts, about: WatchedRecipe) -> float:
    """Groups of a step with verdicts."""
    return fact.metrics.get("trajectories/launched", 0.0) / about.samples - fact.metrics.get("groups/infra", 0.0)


def _is_dead(fact: StepFacts, about: WatchedRecipe) -> bool:
    """True if no group of a step has a contrast, though each has several answers and only contrasts teach."""
    groups = _groups(fact, about)
    return about.samples > 1 and 0 < groups <= fact.metrics.get("groups/dead", 0.0)


def _flat(before: Sequence[StepFacts], now: Sequence[StepFacts], about: WatchedRecipe, name: str) -> str | None:
    """The first other part that judges, if none of them rises."""
    others = [part for part in about.judging if part != name]
    moved = {part: _mean(now, f"reward/part/{part}") - _mean(before, f"reward/part/{part}") for part in others}
    if not others or max(moved.values()) > 0.05:
        return None
    return f"{others[0]} stays at {_mean(now, f'reward/part/{others[0]}'):.2f}"


def _accuracy_is_flat(facts: Sequence[StepFacts]) -> str | None:
    judged = [fact.metrics["eval/accuracy"] for fact in facts if "eval/accuracy" in fact.metrics]
    if len(judged) < 2 or judged[-1] - judged[0] > 0.02:
        return None
    return f"the held-out accuracy stays at {judged[-1]:.2f}"
