"""A page holds what matters most and stays below its limit; nothing in it is markup that was not written by stretto."""

import json
import os
import random
import re
from html.parser import HTMLParser

import pytest

from recorded import conversation, metrics_row, spans_of, trajectory, unpacked, write_run
from stretto.report.html import LIMIT, ReportPage, by_interest
from stretto.report.pack import packed_spans, packed_step
from stretto.report.read_run import RunRecord
from stretto.report.timeline import Span

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>{{script}}]]>\u2028"


def page_of(*folders, **options):
    """The text of a page."""
    return "".join(ReportPage(folders, **options).parts())


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_a_page_has_the_runs_numbers_and_its_answers_token_by_token(tmp_path):
    page = page_of(write_run(tmp_path / "one"))
    head = unpacked(page, "head")
    (run,) = head["runs"]
    assert run["name"] == "one" and run["metrics"]["reward/mean"] == [0.1, 0.2, 0.3] and run["answers"] == [1, 2, 3]
    assert run["weights"] == {"accuracy": 1.0, "format": 0.2} and run["recipe"]["optimizer.lr"] == 1e-4
    groups = unpacked(page, "step-0-2")["groups"]
    assert [group["prompt"] for group in groups] == ["prompt-0", "prompt-1"] and len(groups[0]["attempts"]) == 4
    talk = groups[0]["attempts"][3]["conversations"][0]
    assert talk["runs"] == [2, 3] and talk["advantages"] == [[500, 3]] and len(talk["logprobs"]) == 3
    assert talk["widths"] == [4, 1, 3, 3, 2] and talk["text"] == "What? It is 4"


def test_several_runs_stand_on_one_page_with_what_differs(tmp_path):
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", recipe={"run": {"steps": 3}, "optimizer": {"lr": 2e-4}})
    head = unpacked(page_of(one, other), "head")
    assert [run["name"] for run in head["runs"]] == ["one", "other"]
    assert head["differing"]["optimizer.lr"] == [1e-4, 2e-4]


def test_what_a_model_wrote_is_no_markup(tmp_path):
    words = ["What", "?", HOSTILE, " 4"]
    folder = write_run(
        tmp_path / HOSTILE.replace("/", "_"),
        rows=lambda step: [trajectory(step, HOSTILE, 0, words, failure=HOSTILE, reference=HOSTILE)],
        recipe={"run": {"steps": 3}, "task": {"prompt": HOSTILE}},
    )
    page = page_of(folder)
    tags = Tags(page).found
    assert not [tag for tag, attributes in tags if tag == "img" or any(name.startswith("on") for name in attributes)]
    assert sum(tag == "script" for tag, _ in tags) == 1 + sum("octet-stream" in a.get("type", "") for _, a in tags)
    (group,) = unpacked(page, "step-0-1")["groups"]
    assert group["attempts"][0]["conversations"][0]["text"] == "".join(words)


def test_a_page_may_load_nothing_and_run_nothing_else(tmp_path):
    tags = Tags(page_of(write_run(tmp_path / "one"))).found
    (policy,) = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert (
        policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy and "http" not in policy
    )
    assert not [a for tag, a in tags if "src" in a or (tag in ("link", "a", "iframe", "object"))]


@pytest.mark.slow
def test_a_thousand_steps_of_64_answers_stay_below_the_limit(tmp_path):
    rng = random.Random(0)
    words = [f" word{index}" for index in range(500)]

    def rows(step):
        return [
            trajectory(
                step, group, attempt, value=rng.random(),
                conversations=[conversation(rng.choices(words, k=60), prompt=20, advantage=rng.random(), rng=rng)],
            )
            for group in range(8)
            for attempt in range(8)
        ]  # fmt: skip

    names = [f"reward/part/{index}" for index in range(30)]
    metrics = [metrics_row(step) | {name: rng.random() for name in names} for step in range(1, 1001)]
    spans = [span for span in spans_of(1000) for _ in range(10)]
    folder = write_run(tmp_path / "long", steps=5, rows=rows, metrics=metrics, spans=spans)
    for step in range(6, 1001):  # what is in them does not matter, how many there are does
        os.link(folder / "samples" / f"step-{step % 5 + 1:06d}.jsonl", folder / "samples" / f"step-{step:06d}.jsonl")
    page = page_of(folder, steps=[777])
    assert 0.5 * LIMIT < len(page.encode()) <= LIMIT
    (run,) = unpacked(page, "head")["runs"]
    assert run["sampled"] == 1000 and 20 < len(run["answers"]) < 1000 and {1, 777, 1000} <= set(run["answers"])
    gaps = [after - before for before, after in zip(run["answers"], run["answers"][1:], strict=False)]
    assert max(gaps) < 100  # spread over the run, not only its beginning


def test_a_step_that_is_larger_than_a_page_shows_its_first_groups():
    rng = random.Random(1)
    long = [f"{rng.random()}" for _ in range(400)]
    rows = [trajectory(1, group, 0, rng.sample(long, k=400)) for group in range(60)]
    text = packed_step(rows, limit=100_000)
    page = f'<script id="x">{text}</script>'
    packed = unpacked(page, "x")
    assert len(text) <= 100_000 and packed["groups"] and packed["left_out"] == 60 - len(packed["groups"])
    assert packed_step(rows, limit=1000) is None


def test_a_row_that_is_no_trajectory_costs_nothing_else(tmp_path):
    folder = write_run(tmp_path / "one")
    with (folder / "samples" / "step-000003.jsonl").open("a") as file:
        file.write('{"step": 3, "conversations": 5}\n{"step": 3, "prompt": "x", "conversations": [{"trained": [1]}]}\n')
    groups = unpacked(page_of(folder), "step-0-3")["groups"]
    assert [len(group["attempts"]) for group in groups] == [4, 4]


def test_the_newest_the_first_and_the_odd_steps_come_first(tmp_path):
    metrics = [metrics_row(step, grad_norm=9.0 if step == 40 else 1.0) for step in range(1, 101)]
    run = RunRecord(write_run(tmp_path / "one", steps=100, metrics=metrics, rows=lambda step: [trajectory(step, 0, 0)]))
    order = by_interest(run, first=[55])
    assert order[:3] == [55, 100, 1] and 40 in order[:6] and sorted(order) == list(range(1, 101))


def test_a_page_that_is_written_again_has_the_new_steps(tmp_path):
    folder = write_run(tmp_path / "one")
    page = ReportPage([folder])
    page.write(tmp_path / "page.html")
    (folder / "samples" / "step-000003.jsonl").rename(folder / "samples" / "step-000004.jsonl")
    page.write(tmp_path / "page.html")
    assert unpacked((tmp_path / "page.html").read_text(), "head")["runs"][0]["answers"] == [1, 2, 4]
    assert re.fullmatch(r"page\.html", " ".join(path.name for path in tmp_path.glob("*.html")))


def test_sessions_of_a_resumed_run_stand_one_behind_the_other():
    first = [Span(stage="train", cell="train", start=step * 2.0, seconds=1.0, step=step) for step in (1, 2, 3)]
    second = [Span(stage="train", cell="train", start=step * 2.0 - 6, seconds=1.0, step=step) for step in (4, 5)]
    packed = packed_spans([*first, *second])
    starts, now = [], 0
    for more in packed["start"]:
        now += more
        starts.append(now / 1e4)
    assert packed["step"] == [1, 2, 3, 4, 5] and starts == sorted(starts) and starts[3] >= starts[2] + 1.0


def test_held_out_answers_stand_before_and_after_on_one_line(tmp_path):
    folder = write_run(tmp_path / "one")
    assert "heldout-0" not in page_of(folder)
    for step, said, value in ((0, "no idea", 0.0), (2, "3", 0.5), (3, "4", 1.0)):
        rows = [trajectory(step, group, 0, value=value, answer=said, visit=-1) for group in range(3)]
        rows[1] |= {"reward": None, "failure": "late"}
        text = "".join(json.dumps(row) + "\n" for row in rows[: 3 if step else 2])
        (folder / "samples" / f"eval-{step:06d}.jsonl").write_text(text + '{"step": 3, "prompt": "torn"}\n')
    packed = unpacked(page_of(folder), "heldout-0")
    assert packed["steps"] == [0, 3] and packed["left_out"] == 0
    first, failed, new = packed["rows"]
    assert [first["asked"], first["reference"]] == ["What?", "4"]
    assert [(each["text"], each["reward"]) for each in first["answers"]] == [("no idea", 0.0), ("4", 1.0)]
    assert failed["answers"][1] == {"text": "4", "reward": None, "failure": "late"}
    assert new["answers"][0] is None and new["answers"][1]["reward"] == 1.0
