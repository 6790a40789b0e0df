"""Answers of a step for a terminal: what was asked, what was said, what it was worth, and whether it was trained on.

It turns rows of a run's samples into text. Whatever a model or a dataset wrote is made harmless: no character of it
moves a cursor or changes a color.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stretto.algorithms.catalog import AlgorithmFacts

Order = Literal["first", "best", "worst", "dropped"]

LONGEST = 1200
"""Characters of a text that are shown unless all of it is asked for."""

TABS = str.maketrans({"\t": "    ", "\r": "\N{REPLACEMENT CHARACTER}"})


def harmless(text: str) -> str:
    """Text without characters that would steer a terminal, or turn the direction of what is read."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text.translate(TABS)
    )


def chosen(rows: Sequence[Mapping[str, Any]], order: Order) -> list[Mapping[str, Any]]:
    """The rows in the order that was asked for: those with a verdict by their reward, or those not trained on."""
    if order == "first":
        return list(rows)
    if order == "dropped":
        return [row for row in rows if not row.get("used")]
    judged = [row for row in rows if row.get("reward")]
    return sorted(judged, key=lambda row: float(row["reward"]["value"]), reverse=order == "best")


def reward_text(reward: Mapping[str, Any] | None, weights: Mapping[str, float]) -> str:
    """A reward as the sum that it is: `1 = 0.2*format 0 + correct 1`."""
    if reward is None:
        return "none"
    parts = []
    for name, value in reward["parts"].items():
        weight = weights.get(name, 1.0)
        parts.append(f"{'' if weight == 1 else f'{weight:g}*'}{harmless(str(name))} {value:.3g}")
    return f"{reward['value']:.3g} = {' + '.join(parts)}" if parts else f"{reward['value']:.3g}"


def use_text(row: Mapping[str, Any], group: Sequence[Mapping[str, Any]], facts: AlgorithmFacts | None = None) -> str:
    """Whether an answer was trained on, and if not why; `group` has the answers to the same prompt. Where no `facts` of
    the algorithm are known, what is said of groups of equal rewards follows from what became of them."""
    values = {row["reward"]["value"] for row in group if row.get("reward")}
    if row.get("reward") is None and not (row.get("used") and row.get("failure") is None):  # used where nobody judges
        return f"no: it has no verdict ({harmless(str(row.get('failure') or 'no reason was given'))})"
    alike = len(values) == 1 and len(group) > 1
    if not row.get("used"):
        if alike and (facts is None or facts.drops):
            return (
                f"no: all {len(group)} answers to this prompt got the same reward, and the algorithm drops such groups"
            )
        return "no: its group was not accepted; the step had enough without it, or others of the group have no verdict"
    if (advantage := _advantage(row)) is None:
        return "yes"
    if advantage == 0 and facts is not None and not facts.learns_by_contrast:
        return "yes"  # by more than its advantage: a teacher over whole distributions, a regression
    if alike and advantage == 0:
        return f"yes, but it taught nothing: all {len(group)} answers to this prompt got the same reward"
    return f"yes, advantage {advantage:+.3g}"


def _advantage(row: Mapping[str, Any]) -> float | None:
    """The mean advantage of the tokens that were trained."""
    found = [
        value
        for talk in row.get("conversations", ())
        for value, mask in zip(talk["advantages"], talk["trained"], strict=True)
        if mask
    ]
    return sum(found) / len(found) if found else None


def page(
    rows: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float],
    facts: AlgorithmFacts | None = None,
    *,
    step: int | None = None,
    held_out: bool = False,
    truncated: str = "",
    order: Order = "first",
    most: int = 8,
    full: bool = False,
) -> str:
    """The answers of a step, or those to `held_out` prompts after it; `truncated` says what their file lacks.

    `full` shows whole conversations with their special tokens, and cuts nothing.
    """
    groups: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["prompt"], row["visit"]].append(row)
    found = chosen(rows, order)
    uses = [None if held_out else use_text(row, groups[row["prompt"], row["visit"]], facts) for row in found[:most]]
    shown = [_sample(row, use, weights, full) for row, use in zip(found[:most], uses, strict=True)]
    used, judged = sum(bool(row.get("used")) for row in rows), sum(bool(row.get("reward")) for row in rows)
    what = {"first": "", "best": ", best first", "worst": ", worst first", "dropped": " that were not trained on"}
    shown_step = step if step is not None else rows[0]["step"] if rows else 0
    told = (
        f"{len(rows)} held-out answers, {judged} with a verdict"
        if held_out
        else f"{len(rows)} answers to {len(groups)} prompts, {judged} with a verdict, {used} trained on"
    )
    head = (
        f"step {shown_step}: {told}\n{truncated}{chr(10) if truncated else ''}"
        f"{min(most, len(found))} of {len(found)} answers{what[order]}"
    )
    return "\n\n".join([head, *shown])


def _sample(row: Mapping[str, Any], use: str | None, weights: Mapping[str, float], full: bool) -> str:
    lines = [f"prompt {harmless(str(row['prompt']))}, attempt {row['attempt']}"]
    lines += _field("asked", "\n".join(f"{each['role']}: {each['content']}" for each in row["messages"]), full)
    if full or row.get("answer") is None:
        for number, talk in enumerate(row["conversations"], 1):
            name = "text" if len(row["conversations"]) == 1 else f"text {number}"
            lines += _field(name, f"{talk['text']}", full)
    if row.get("answer") is not None:
        lines += _field("answer", str(row["answer"]), full)
    if row.get("reference") is not None:
        lines += _field("reference", str(row["reference"]), full)
    stops = [talk["stop"] for talk in row["conversations"]]
    if "length" in stops:
        lines += _field("cut off", "yes: it reached the token limit", full)
    lines += _field("reward", reward_text(row.get("reward"), weights), full)
    if use is not None:
        lines += _field("used", use, full)
    return "\n".join(lines)


def _field(name: str, text: str, full: bool) -> list[str]:
    """A name and a text beside it, each line indented."""
    more = "" if full or len(text) <= LONGEST else f" ... ({len(text) - LONGEST:,} more characters; --full shows them)"
    first, *others = harmless(text if full else text[:LONGEST]).split("\n")
    lines = [f"  {name:<10}{first}", *(f"  {'':<10}{line}" for line in others)]
    lines[-1] += more
    return [line.rstrip() for line in lines]
