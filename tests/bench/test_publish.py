"""The bench of publishes on a tiny model: workers in threads of this process, and vLLM's process as a fake."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fake_vllm import FakeHost
from stretto.bench import run
from stretto.bench.prepare import prepare
from stretto.bench.publish_rows import publish_rows
from stretto.bench.publishing import PublishWorker, publish
from stretto.bench.run import BENCHES, BenchRequest, measure
from stretto.cli.main import main
from stretto.engines.apart import EngineDeadlines
from stretto.engines.vllm.engine import VllmEngine, VllmSettings
from stretto.errors import StrettoError
from stretto.workers.launchers.inprocess import ThreadLauncher

WISH = BenchRequest(bench="publish", model="scratch", steps=2)


def fake_vllm(policy, spoil=None):
    """vLLM's engine on a process that keeps what it is sent."""
    settings = VllmSettings(
        versions=("0.32",), dtype="bfloat16", context=64, cache_bytes=1 << 20,
        rank=None if policy.adapted is None else 16, device="cpu",
    )  # fmt: skip
    patience = EngineDeadlines(start=9.0, generate=9.0, publish=9.0, first=9.0)
    return VllmEngine(policy, lambda: FakeHost(spoil), name="vLLM", settings=settings, deadlines=patience)


def here(job, engine=fake_vllm):
    """Does a job in this process."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    if job.side == "prepare":
        return prepare(job)
    make = partial(PublishWorker, make_engine=engine) if job.plans == ("vLLM",) else PublishWorker
    return publish(job, launch=lambda devices: ThreadLauncher(make))


def as_if_installed(setting, case):
    """The rows where there is a Python that has vLLM."""
    return publish_rows(replace(setting, vllm=True), case)


def measured(engine, *cases):
    """The rows of a bench whose vLLM is this engine, by case and way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.BENCHES, "publish", replace(BENCHES["publish"], rows=as_if_installed))
        document = measure(replace(WISH, cases=cases), note=len, run=partial(here, engine=engine))
    return {tuple(row["case"].split(", ")): row for row in document["rows"]}


@pytest.fixture(scope="module")
def rows():
    return measured(fake_vllm, "all")


def test_every_way_of_handing_over_is_measured_beside_its_forecast(rows):
    assert set(rows) == {(case, way) for case in ("adapter", "full") for way in ("same process", "second cell", "vLLM")}
    for row in rows.values():
        seconds = row["seconds"]
        assert row["unit"] == "s/hand-over" and row["stretto"] == seconds["hand-over"]
        assert seconds["publish"] == pytest.approx(seconds["hand-over"] + seconds["proof"])
        assert min(seconds.values()) > 0


def test_bytes_are_those_of_what_is_trained_and_none_where_tensors_are_shared(rows):
    sizes = {case: row["bytes"] for case, row in rows.items()}
    assert sizes["full", "same process"] == sizes["adapter", "same process"] == 0
    for case in ("full", "adapter"):  # a file has a header besides, and a bucket is aligned
        assert 0 < sizes[case, "second cell"] <= sizes[case, "vLLM"] < 1.5 * sizes[case, "second cell"]
    assert rows["full", "vLLM"]["trained_weights"] == "all"


def test_a_forecast_of_nothing_has_no_ratio(rows):
    for (_, way), row in rows.items():
        if way == "same process":
            assert (row["peer"], row["ratio"]) == (0, None)
        else:
            assert row["ratio"] == pytest.approx(row["peer"] / row["stretto"])
    assert rows["full", "vLLM"]["peer"] != rows["full", "second cell"]["peer"]


def test_weights_that_do_not_arrive_have_no_time():
    def unheard(what, arguments, host):
        if what == "load" and host.called.count("begin") > 1:
            return {}

    with pytest.raises(StrettoError, match="are not those of policy-v1"):
        measured(partial(fake_vllm, spoil=unheard), "full")


def test_where_vllm_is_missing_its_row_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "measure", partial(measure, run=here))
    page, command = tmp_path / "page.md", ["bench", "publish", "--case", "full", "--model", "scratch"]
    assert main([*command, "--write", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "full, vLLM       -  - against - s/hand-over" in shown
    assert "vLLM is not installed; make engine builds one" in shown
    text = page.read_text()
    assert "| full, vLLM | s/hand-over | - | - | - |" in text
    assert "full, vLLM, left out: vLLM is not installed" in text
    assert "| case | publish, s | hand-over, s | proof, s | MB handed over |" in text
