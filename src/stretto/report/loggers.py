"""Other places that a run's numbers go to: Weights & Biases, Trackio, MLflow, and classes of the user's.

Each is a sink of the journal: it takes the recipe as hyperparameters, the metrics of each step and a table of its
answers. Accounts, addresses and projects are those that the library itself reads from its environment variables; the
name is the run's folder. What a library raises costs its own numbers, never the run, and is told once (`TolerantSink`).
A library is imported when its logger is made.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.report.samples_text import reward_text

PROJECT = "stretto"
"""Where runs are collected, unless the library's own environment variable names another place."""

COLUMNS = ("step", "prompt", "attempt", "asked", "answer", "reference", "reward", "parts", "used")
"""Of the table of answers."""

MOST = 64
"""Answers of a step that go into a table; all are in the run's folder."""

PARAMETERS = 100
"""Parameters that MLflow takes in one call."""

LONGEST = 500
"""Characters of a parameter that MLflow takes in every version."""


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Answers as rows of `COLUMNS`."""
    return [
        [
            row["step"],
            str(row["prompt"]),
            row["attempt"],
            "\n".join(f"{each['role']}: {each['content']}" for each in row["messages"]),
            "" if row.get("answer") is None else str(row["answer"]),
            "" if row.get("reference") is None else str(row["reference"]),
            row["reward"]["value"] if row.get("reward") else None,
            reward_text(row.get("reward"), {}),
            bool(row.get("used")),
        ]
        for row in rows[:MOST]
    ]


class WandbLogger:
    """A run of Weights & Biases, or of Trackio, which has the same interface."""

    def __init__(self, folder: Path, *, library: str = "wandb", after: int | None = None, api: Any = None) -> None:
        """`after` is the step that a resumed run goes on behind."""
        self._api: Any = api or import_module(library)
        self._folder, self._library, self._after = folder, library, after

    def recipe(self, keys: Mapping[str, Any]) -> None:
        """Begins the run, with the recipe as its hyperparameters; a resumed one goes on in the run that it was."""
        name, kept = self._folder.resolve().name, self._folder / f"{self._library}.txt"
        begins_again = self._after is not None and self._after < 1 and not kept.is_file()
        if self._after is None or begins_again:  # folders of one name may be many, and an id is the project's for ever
            kept.write_text(f"{name}-{secrets.token_hex(4)}\n", encoding="utf-8")
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else name
        project = os.environ.get(f"{self._library.upper()}_PROJECT", PROJECT)
        resume = "never" if self._after is None else "allow"
        own = {"id": known, "dir": str(self._folder)} if self._library == "wandb" else {}
        self._api.init(project=project, name=name, resume=resume, config=dict(keys), **own)

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of a step."""
        self._api.log({name: value for name, value in values.items() if value is not None}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of answers."""
        self._api.log({"samples": self._table(table_rows(rows))}, step=step)

    def close(self) -> None:
        """The end of the run."""
        self._api.finish()

    def _table(self, rows: list[list[Any]]) -> Any:
        return self._api.Table(columns=list(COLUMNS), data=rows)


class TrackioLogger(WandbLogger):
    """A run of Trackio: a local database and a dashboard, without an account."""

    def __init__(self, folder: Path, *, after: int | None = None, api: Any = None) -> None:
        super().__init__(folder, library="trackio", after=after, api=api)

    def _table(self, rows: list[list[Any]]) -> Any:
        pandas: Any = import_module("pandas")  # which Trackio brings
        return self._api.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))


class MlflowLogger:
    """A run of MLflow."""

    def __init__(self, folder: Path, *, after: int | None = None, api: Any = None) -> None:
        """A resumed run goes on in the MLflow run that it began, if its folder says which that was."""
        self._api: Any = api or import_module("mlflow")
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
            self._api.set_experiment(PROJECT)
        kept = folder / "mlflow.txt"
        self._again = after is not None and (after > 0 or kept.is_file())
        if after is not None and kept.is_file():
            self._api.start_run(run_id=kept.read_text(encoding="ascii").strip())
        else:
            run = self._api.start_run(run_name=folder.resolve().name)
            kept.write_text(f"{run.info.run_id}\n", encoding="ascii")

    def recipe(self, keys: Mapping[str, Any]) -> None:
        """Hyperparameters, as text. MLflow keeps the first value of each, so a resumed run says only what is new."""
        if self._again:
            return
        found = [(name, str(value)[:LONGEST]) for name, value in keys.items()]
        for start in range(0, len(found), PARAMETERS):
            self._api.log_params(dict(found[start : start + PARAMETERS]))

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of a step."""
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        folders = {name for name in numbers if any(other.startswith(f"{name}/") for other in numbers)}
        # MLflow's files have a folder for each part of a name, so that none may be a number and a folder.
        self._api.log_metrics({f"{n}/mean" if n in folders else n: value for n, value in numbers.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of answers, one file a step."""
        columns = zip(*table_rows(rows), strict=True)
        data = {name: list(values) for name, values in zip(COLUMNS, columns, strict=True)} if rows else {}
        self._api.log_table(data=data, artifact_file=f"samples/step-{step:06d}.json")

    def close(self) -> None:
        """The end of the run."""
        self._api.end_run()


class TolerantSink:
    """A sink that may fail without the run failing; methods that it does not have are passed over."""

    def __init__(self, sink: Any, name: str, note: Callable[[str], None], describe: Callable[[Exception], str]) -> None:
        self.sink, self.name, self.note, self.describe = sink, name, note, describe
        self.failed = False

    def recipe(self, keys: Mapping[str, Any]) -> None:
        """The recipe, by dotted names."""
        self._try("recipe", dict(keys))

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of a step."""
        self._try("metrics", step, dict(values))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The answers of a step."""
        self._try("samples", step, list(rows))

    def close(self) -> None:
        """The end of the run."""
        self._try("close")

    def _try(self, method: str, *arguments: Any) -> None:
        call = getattr(self.sink, method, None)
        if call is None:
            return
        try:
            call(*arguments)
        except Exception as error:
            if not self.failed:
                told = f"{self.name} raised {self.describe(error)} in {method}"
                self.note(f"{told}; the run goes on, and more of it is not told")
            self.failed = True


LIBRARIES: dict[str, Callable[..., Any]] = {"wandb": WandbLogger, "trackio": TrackioLogger, "mlflow": MlflowLogger}
"""Name in a recipe's `log`, which is that of the package -> its logger."""


def library_logger(name: str, folder: Path, *, after: int | None, note: Callable[[str], None]) -> TolerantSink:
    """The logger of a library. One that cannot begin (no account, no network) is noted, and logs nothing."""

    def describe(error: Exception) -> str:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]

    try:
        sink = LIBRARIES[name](folder, after=after)
    except Exception as error:
        note(f"log: {name} cannot begin ({describe(error)}); the run goes on without it")
        sink = None
    return TolerantSink(sink, name, note, describe)
