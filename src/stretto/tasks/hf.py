"""Prompts from Hugging Face datasets: files and folders on this machine, or a dataset of the hub by its name.

The only file that imports `datasets`. Rows are read one after the other and only as many as are asked for; nothing of
a dataset is ever run, and formats that hold more than rows of plain values are refused. What is no JSON in a row
(pictures, sound) is left out of it. The hub is asked once, with a deadline, before anything tries and tries again.
"""

from __future__ import annotations

import datetime
import glob
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from stretto import hub
from stretto.errors import DeadlineError, Problem, RecipeError
from stretto.extras import missing_extra
from stretto.hub import HubUnreachable
from stretto.recipe.schema import HubSource, TaskSection
from stretto.tasks.columns import Row, RowError
from stretto.tasks.jsonl import LONGEST_ROW
from stretto.tasks.rows import find, gather
from stretto.tasks.rows import problems as column_problems
from stretto.tasks.template import pick_one, printable
from stretto.types import Prompt

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""How a file is read, by its ending."""
PLAIN = frozenset({*BUILDERS.values(), "cache"})
"""The readers that give rows of plain values and nothing else; `cache` is what was downloaded before."""
SOURCE = "task.source"


def problems(task: TaskSection, source: HubSource) -> Iterator[Problem]:
    """What is wrong with the settings, without reading anything."""
    if source.path is None and source.name is None:
        fix = "set task.source.path to a file or folder, or task.source.name to a dataset of the hub"
        yield Problem(field=f"{SOURCE}.name", reason="an hf source needs a dataset", fix=fix)
    if source.path is not None and source.name is not None:
        fix = "remove one of the two"
        yield Problem(field=f"{SOURCE}.name", reason="has no effect, because task.source.path is read", fix=fix)
    if lacking := missing_extra("datasets", f"{SOURCE}.kind"):
        yield lacking
    yield from column_problems(task, source)


def read(task: TaskSection, source: HubSource, root: Path, limit: int | None) -> tuple[list[Prompt], list[Problem]]:
    """The prompts, or those of the first `limit` rows, and what is wrong with the settings or the rows."""
    if wrong := list(problems(task, source)):
        return [], wrong
    try:
        where, rows = _local(source, root) if source.path is not None else _hub(source, limit)
        return _prompts(task, source, rows, limit, where)
    except HubUnreachable as error:
        # A recipe can be written, checked and planned without the hub; only what needs all rows must have it.
        return [], list(error.problems) if limit is None else []
    except RecipeError as error:
        return [], list(error.problems)


def _prompts(
    task: TaskSection, source: HubSource, rows: Iterable[Any], limit: int | None, where: str
) -> tuple[list[Prompt], list[Problem]]:
    """The rows as prompts, as far as they can be read."""
    try:
        prompts, found = gather(task, source, enumerate(islice(rows, limit), start=1), plain, where=where, unit="row")
    except DeadlineError:  # it is not the files' fault
        raise
    except Exception as error:  # the readers of `datasets` raise whatever the libraries of their formats raise
        raise _refusal(where, f"cannot be read: {said(error)}", "repair the data") from error
    if not prompts and not found:
        found.append(Problem(field=where, reason="there are no rows", fix="name data that has some"))
    return prompts, found


def _library() -> Any:
    """The package. It is told that there is no torch, which it would load to make its datasets look like torch's."""
    before = os.environ.get("USE_TORCH")
    os.environ["USE_TORCH"] = "0"
    try:
        import datasets
    finally:
        if before is None:
            del os.environ["USE_TORCH"]
        else:
            os.environ["USE_TORCH"] = before
    return datasets


def _local(source: HubSource, root: Path) -> tuple[str, Iterable[Any]]:
    """What a path holds: one file, what `save_to_disk` wrote, or a folder of data files."""
    path = find(str(source.path), root, "file or folder", os.path.exists)
    if isinstance(path, Problem):
        raise RecipeError(path)
    library, field = _library(), f"{SOURCE}.path"
    if path.is_file():
        _refuse_parts(source, "a file")
        builder = BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise _refusal(field, f"{path} is of no kind that is read here", f"use one of {', '.join(BUILDERS)}")
        made = _open(library, builder, field, data_files=glob.escape(str(path)))
        return str(path), _stream(made, "train", str(path))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return str(path), _saved(library, source, path)
    made = _open(library, str(path.absolute()), field, name=source.subset)
    return str(path), _stream(made, _split(source, list(made.config.data_files or ())), str(path))


def _saved(library: Any, source: HubSource, path: Path) -> Iterable[Any]:
    """What `save_to_disk` wrote: one dataset, or one per split."""
    try:
        found = library.load_from_disk(str(path))
    except Exception as error:
        raise _refusal(str(path), f"cannot be read: {said(error)}", "save the dataset again") from error
    if isinstance(found, library.DatasetDict):
        _refuse_parts(source, "a saved dataset", keys=("subset",))
        found = found[_split(source, list(found))]
    else:
        _refuse_parts(source, "a saved dataset without splits")
    rows: Iterable[Any] = found.to_iterable_dataset().decode(False)
    return rows


def _hub(source: HubSource, limit: int | None) -> tuple[str, Iterable[Any]]:
    """A dataset of the hub: some rows as they come, or all of it through the cache."""
    name, field = str(source.name), f"{SOURCE}.name"
    hub.ask("dataset", name, field=field, instead="for data on this machine set task.source.path")
    library = _library()
    made = _open(library, name, field, name=source.subset)
    split = _split(source, list(made.config.data_files or made.info.splits or ()))
    if limit is not None and made.config.data_files:
        return name, _stream(made, split, name)
    try:
        made.download_and_prepare()
        rows: Iterable[Any] = made.as_dataset(split=split).to_iterable_dataset().decode(False)
    except DeadlineError:  # it is not the files' fault
        raise
    except Exception as error:
        raise _refusal(field, f"{name} cannot be read: {said(error)}", "try again, or name other data") from error
    return name, rows


def _open(library: Any, what: str, field: str, **settings: Any) -> Any:
    """The reader of some data, which has read nothing yet. Only readers of plain rows are used.

    `datasets` runs no code of a dataset since 4.0, the least version that is installed, and knows no word for it.
    """
    try:
        builder = library.load_dataset_builder(what, **settings)
    except DeadlineError:  # it is not the files' fault
        raise
    except Exception as error:
        if "Config" in str(error):
            raise _refusal(f"{SOURCE}.subset", said(error), "name one of them") from error
        fix = "correct the name, or set task.source.path to data on this machine"
        raise _refusal(field, f"{printable(what, 200)} cannot be opened: {said(error)}", fix) from error
    modules = {base.__module__.rpartition(".")[2] for base in type(builder).__mro__}
    if not modules & PLAIN:
        fix = f"use data in one of {', '.join(BUILDERS)}"
        raise _refusal(field, f"{printable(what, 200)} holds no rows of text and numbers", fix)
    return builder


def _stream(builder: Any, split: str, where: str) -> Iterable[Any]:
    """The dataset's rows one after the other, from where they lie."""
    try:
        found = builder.as_streaming_dataset(split=split)
        rows: Iterable[Any] = found if found.features is None else found.decode(False)
    except Exception as error:
        raise _refusal(where, f"cannot be read: {said(error)}", "repair the data") from error
    return rows


def _split(source: HubSource, names: list[Any]) -> str:
    """The split to read, of those that there are."""
    there, wanted = [str(name) for name in names], source.split
    if wanted is None and len(there) == 1:
        return there[0]
    if (wanted or "train") not in there:
        reason = f"there is no split {wanted or 'train'!r}"
        raise _refusal(f"{SOURCE}.split", reason, pick_one(wanted or "train", there).replace("columns", "splits"))
    return wanted or "train"


def _refuse_parts(source: HubSource, what: str, keys: tuple[str, ...] = ("split", "subset")) -> None:
    for key in keys:
        if getattr(source, key) is not None:
            raise _refusal(f"{SOURCE}.{key}", f"has no effect on {what}", "remove it")


def _refusal(field: str, reason: str, fix: str) -> RecipeError:
    return RecipeError.of(field, reason, fix)


def said(error: Exception) -> str:
    """What somebody else's exception says, fit for one line."""
    lines = str(error).strip().splitlines()
    return printable(lines[0] if lines else type(error).__name__, 300)


def plain(row: Mapping[str, Any]) -> Row:
    """The row's columns that are JSON. Days and times become text, numbers that are none become null."""
    kept: dict[str, Any] = {}
    size = 0
    for name, value in row.items():
        if isinstance(value, str) and len(value) > LONGEST_ROW:
            size += len(value)
            continue
        value = _plain(value)
        if (length := _length(value)) is not None:
            kept[str(name)] = value
            size += length
    if size > LONGEST_ROW:
        raise RowError(f"the row has more than {LONGEST_ROW // 2**20} MiB of text", "shorten it, or take it out")
    return kept


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(below) for key, below in value.items()}
        case list() | tuple():
            return [_plain(below) for below in value]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _length(value: Any) -> int | None:
    """Bytes of the value as JSON in UTF-8; none if it cannot be that."""
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except (TypeError, ValueError, RecursionError):
        return None
