"""Loggers of other libraries behind one seam, against fakes of their interfaces, and the real one if installed."""

import json
from types import SimpleNamespace

import pytest

from sample_rows import row
from stretto.report.loggers import COLUMNS, MlflowLogger, TolerantSink, TrackioLogger, WandbLogger, table_rows

KEYS = {"optimizer.lr": 1e-4, "algorithm.name": "grpo", "model.adapter": None}


class FakeWandb:
    """What of wandb and trackio is used."""

    def __init__(self):
        self.told = []

    def init(self, **keywords):
        self.told.append(("init", keywords))

    def log(self, values, step=None):
        self.told.append(("log", values, step))

    def Table(self, columns, data):
        return {"columns": columns, "data": data}

    def finish(self):
        self.told.append(("finish",))


class FakeMlflow:
    """What of mlflow is used."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            self.told.append((name, *arguments, keywords))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc123"))

        return call


def whole(sink):
    sink.recipe(KEYS)
    sink.metrics(3, {"loss": 0.5, "grad_norm": None})
    sink.samples(3, [row(0), row(1, 0.0)])
    sink.close()


def test_wandb_gets_the_recipe_numbers_and_a_table_of_answers(tmp_path):
    api = FakeWandb()
    (tmp_path / "tiny-001").mkdir()
    whole(WandbLogger(tmp_path / "tiny-001", api=api))
    begun, numbers, table, ended = api.told
    own = begun[1].pop("id")
    assert begun[1] == {
        "project": "stretto", "name": "tiny-001", "resume": "never", "config": KEYS, "dir": str(tmp_path / "tiny-001"),
    }  # fmt: skip
    assert own.startswith("tiny-001-") and len(own) > len("tiny-001-"), "another folder of this name is another run"
    assert numbers == ("log", {"loss": 0.5}, 3)
    assert table[1]["samples"]["columns"] == list(COLUMNS)
    assert table[1]["samples"]["data"][0][3:8] == ["user: 3+4?", "7", "7", 1.0, "1 = format 0 + correct 1"]
    assert ended == ("finish",)


def test_a_resumed_run_goes_on_in_the_same_place(tmp_path):
    api, older = FakeWandb(), FakeWandb()
    for after in (None, 4):
        WandbLogger(tmp_path, after=after, api=api).recipe(KEYS)
    assert [told["resume"] for _, told in api.told] == ["never", "allow"] and api.told[0][1]["id"] == api.told[1][1][
        "id"
    ]
    WandbLogger(tmp_path / "tiny-001", after=4, api=older).recipe(KEYS)
    assert older.told[0][1]["id"] == "tiny-001", "as it was called before ids were kept"
    first, again = FakeMlflow(), FakeMlflow()
    whole(MlflowLogger(tmp_path, api=first))
    whole(MlflowLogger(tmp_path, after=3, api=again))
    assert ("start_run", {"run_id": "abc123"}) in again.told
    assert [name for name, *_ in again.told].count("log_params") == 0


@pytest.mark.parametrize("after", [-1, 0])
def test_a_run_that_was_begun_again_is_another_run_there(tmp_path, after):
    """A restart sets aside the files that say which run it was; W&B would drop the steps that it has already."""
    api, ours = FakeWandb(), FakeMlflow()
    for behind in (None, after):
        WandbLogger(tmp_path, after=behind, api=api).recipe(KEYS)
        (tmp_path / "wandb.txt").unlink()
    one, other = (told["id"] for _, told in api.told)
    assert one != other and all(each.startswith(f"{tmp_path.name}-") for each in (one, other))
    MlflowLogger(tmp_path, after=after, api=ours).recipe(KEYS)
    assert "log_params" in [name for name, *_ in ours.told]


def test_mlflow_gets_the_recipe_in_portions_numbers_and_a_table(tmp_path):
    api = FakeMlflow()
    sink = MlflowLogger(tmp_path, api=api)
    sink.recipe({f"key{i}": "x" * 9000 for i in range(250)})
    portions = [told[1] for told in api.told if told[0] == "log_params"]
    assert [len(portion) for portion in portions] == [100, 100, 50]
    assert max(len(value) for portion in portions for value in portion.values()) == 500
    sink.metrics(3, {"loss": 1, "grad_norm": None})
    assert api.told[-1] == ("log_metrics", {"loss": 1.0}, {"step": 3})
    sink.samples(3, [row(0)])
    assert api.told[-1][1]["artifact_file"] == "samples/step-000003.json"
    assert set(api.told[-1][1]["data"]) == set(COLUMNS)


def test_the_project_is_the_one_that_the_library_was_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    api = FakeWandb()
    WandbLogger(tmp_path, api=api).recipe(KEYS)
    assert api.told[0][1]["project"] == "mine"


def test_what_a_library_raises_is_told_once_and_costs_nothing_else():
    notes = []

    class Broken:
        def metrics(self, step, values):
            raise ConnectionError("no network")

    sink = TolerantSink(Broken(), "wandb", notes.append, repr)
    whole(sink)
    sink.metrics(4, {})
    assert notes == [
        "wandb raised ConnectionError('no network') in metrics; the run goes on, and more of it is not told"
    ]


def test_a_table_has_no_more_rows_than_a_page_shows():
    assert len(table_rows([row(n) for n in range(100)])) == 64
    json.dumps(table_rows([row(0, failure="late")]))


def test_trackio_itself_takes_all_of_it(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    whole(TrackioLogger(tmp_path / "tiny-001", api=trackio))


def test_mlflow_gets_no_metric_that_is_a_folder_of_another(tmp_path):
    api = FakeMlflow()
    seen = []
    api.log_metrics = lambda metrics, step: seen.append(metrics)
    MlflowLogger(tmp_path, api=api).metrics(1, {"eval/reward": 0.5, "eval/reward/part/a": 0.25, "eval/rewards": 1.0})
    assert seen == [{"eval/reward/mean": 0.5, "eval/reward/part/a": 0.25, "eval/rewards": 1.0}]
