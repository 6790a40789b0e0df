"""Run folders without a run: metrics, samples, plan and timeline as a run would have written them."""

import json
import random

import yaml

from stretto.report.timeline import Span, to_events

RECIPE = {
    "run": {"steps": 3},
    "batch": {"prompts": 2, "samples": 4, "token_budget": "auto", "updates": 1},
    "rewards": [{"name": "accuracy", "weight": 1.0}, {"name": "format", "weight": 0.2}],
    "algorithm": {"name": "grpo"},
    "optimizer": {"lr": 1e-4},
    "model": {"adapter": None},
    "engine": {"kind": "native"},
}


def conversation(words, *, prompt=2, advantage=0.5, rng=random):
    """A conversation of these words, the first ones as context."""
    count = len(words)
    trained = [int(index >= prompt) for index in range(count)]
    return {
        "tokens": list(range(count)),
        "trained": trained,
        "logprobs": [round(rng.uniform(-3, 0), 6) if flag else 0 for flag in trained],
        "advantages": [advantage * flag for flag in trained],
        "stop": "stop",
        "version": 0,
        "parent": None,
        "text": "".join(words),
        "widths": [len(word) for word in words],
    }


def trajectory(step, group, attempt, words=("What", "?", " It", " is", " 4"), *, value=1.0, **more):
    """A row of a samples file."""
    return {
        "step": step,
        "prompt": f"prompt-{group}",
        "visit": 0,
        "attempt": attempt,
        "environment": "single_turn",
        "messages": [{"role": "user", "content": "What?"}],
        "conversations": [conversation(list(words))],
        "answer": "".join(words[2:]),
        "reference": "4",
        "reward": {"value": value, "outcome": value, "parts": {"accuracy": value, "format": 1.0}},
        "failure": None,
        "used": True,
        **more,
    }


def metrics_row(step, **more):
    """A row of metrics.jsonl."""
    usual = {
        "step": step,
        "reward/mean": 0.1 * step,
        "grad_norm": 1.0,
        "seconds/step": 2.0,
        "groups/used": 2,
        "groups/dead": 0,
        "trajectories/launched": 8,
        "trajectories/failed": 0,
    }
    return usual | more


def spans_of(steps, seconds=(1.2, 0.7)):
    """One device that generates, then trains, a little later each time."""
    spans, now = [], 0.0
    for step in range(1, steps + 1):
        for stage, each in zip(("generate", "train"), seconds, strict=True):
            spans.append(Span(stage=stage, cell=stage, start=now, seconds=each, step=step, groups=2, tokens=40))
            now += each
        now += 0.1
    return spans


def write_run(folder, *, steps=3, rows=None, metrics=None, spans=None, plan=None, recipe=None, samples=True):
    """A run's folder; `rows` gives the rows of a step's samples."""
    (folder / "samples").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe or RECIPE | {"run": {"steps": steps}}))
    (folder / "plan.json").write_text(json.dumps(plan or {}))
    metrics = [metrics_row(step) for step in range(1, steps + 1)] if metrics is None else metrics
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    events = [json.dumps(event) for event in to_events(spans_of(steps) if spans is None else spans, "localhost")]
    (folder / "timeline.json").write_text('{"traceEvents": [\n' + ",\n".join(events) + "\n]}\n")
    (folder / "events.jsonl").write_text(json.dumps({"time": "now", "kind": "started", "step": 0}) + "\n")
    made = rows or (lambda step: [trajectory(step, group, attempt) for group in range(2) for attempt in range(4)])
    for step in range(1, steps + 1) if samples else ():
        text = "".join(json.dumps(row) + "\n" for row in made(step))
        (folder / "samples" / f"step-{step:06d}.jsonl").write_text(text)
    return folder


def unpacked(page, name):
    """The value of a blob of a page."""
    import base64
    import re
    import zlib

    text = re.search(rf'id="{name}">([^<]*)<', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(text)))
