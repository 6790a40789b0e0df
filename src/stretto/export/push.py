"""A run's model on a hub: a folder with a model card that says where the model comes from, proved, then uploaded.

The hub is a seam of one call, so that whatever is uploaded can be looked at first. The folder stays in the run, whether
it was uploaded or not. What is secret (the token) is for the hub's own library to find and is never read here.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stretto.errors import ExportError
from stretto.export.card import CardFacts, recipe_text, refuse_names, write_card
from stretto.export.merge import AUTO, PROOF, Note, merge, refuse_plain, settle, write_ends
from stretto.export.proof import ExportProof, ask_run, prove
from stretto.export.saved_model import SavedModel
from stretto.storage.atomic import storing
from stretto.storage.manifest import ADAPTER, BASE, STATE

OF_MODELS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "adapter_*", "config.json",
    "generation_config.json",
)  # fmt: skip
"""Files of a model, as patterns: those in a repository that are not uploaded anew go."""


class Hub(Protocol):
    """Where models are published."""

    def publish(self, folder: Path, repo: str, *, private: bool, message: str) -> str:
        """Uploads all of a folder as a repository and returns its address."""
        ...


class HuggingFaceHub:
    """Hugging Face's hub, with the token that `hf auth login` or $HF_TOKEN has left."""

    def publish(self, folder: Path, repo: str, *, private: bool, message: str) -> str:
        """Makes the repository if there is none, and uploads."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        hub = HfApi()
        try:
            found = hub.create_repo(repo, private=private, exist_ok=True)
            # What an earlier push has left would be loaded in the place of, or on top of, what was proved.
            hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=list(OF_MODELS))
        except (HfHubHTTPError, OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise ExportError(
                f"{repo} was not published: {reason}\n    fix: `hf auth login`, or write access to it; all that would "
                f"be uploaded is in {folder}"
            ) from error
        return str(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push came to."""

    folder: Path
    """All that is, or would be, in the repository."""
    url: str | None
    """Where it is; none if nothing was sent."""
    merged: bool
    """True if an adapter was merged into its base for it."""
    proof: ExportProof
    """How it compares with the run."""


def push(
    model: SavedModel,
    repo: str,
    *,
    license: str | None,
    merged: bool,
    plain: bool = False,
    private: bool,
    hub: Hub | None,
    most: int,
    note: Note,
) -> Pushed:
    """Makes the folder and uploads it; without a hub it is only made. `plain` is as for `merge`."""
    refuse_names(repo, license)
    refuse_plain(model, plain)
    if license is None:
        note("the card states no license, so nobody may use the model; --license apache-2.0, or that of its base, does")
    adapter = model.files.adapter is not None
    if adapter and not merged and not model.files.on_hub:
        note(f"others cannot get the adapter's base, {model.recipe.model.name}, so the two are merged")
        merged = True
    folder = model.run / "push" / model.checkpoint.name
    draft = folder.with_name(f".{folder.name}.partial")
    with storing(folder):
        for old in (draft, folder):
            shutil.rmtree(old, ignore_errors=True)
        try:
            proof, stop = _fill(model, draft, merge_it=adapter and merged, plain=plain, most=most, note=note)
            facts = CardFacts(repo=repo, license=license, merged=adapter and merged, proof=proof, stop=stop)
            (draft / "README.md").write_text(write_card(model, facts), encoding="utf-8")
            (draft / "recipe.yaml").write_text(recipe_text(model), encoding="utf-8")
            settle(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    message = f"step {model.step} of a stretto run"
    url = None if hub is None else hub.publish(folder, repo, private=private, message=message)
    return Pushed(folder=folder, url=url, merged=facts.merged, proof=proof)


def _fill(
    model: SavedModel, draft: Path, *, merge_it: bool, plain: bool, most: int, note: Note
) -> tuple[ExportProof, frozenset[int]]:
    """The model's files, proved; and the tokens that end its answers."""
    if merge_it:
        proof = merge(model, draft, dtype=AUTO, plain=plain, most=most, note=note).proof
        (draft / PROOF).unlink()  # it names folders of this machine; the card says the rest
        return proof, ends_of(draft)
    shutil.copytree(model.checkpoint, draft, ignore=shutil.ignore_patterns(STATE, "README.md"))
    if model.files.adapter is not None:
        config = json.loads((draft / ADAPTER).read_text("utf-8"))
        config[BASE] = model.files.name  # a hub id; what was written may be a folder of this machine
        (draft / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    policy = model.load("float32")
    run = ask_run(model, policy, most=most)
    write_ends(model.folder, policy, draft)
    del policy
    kind = model.recipe.model.quantize
    if kind != "none":
        note(f"whoever loads it has the base as it is stored, not as {kind} rounds it; --merged writes the latter")
    return prove(run, draft, exact=kind == "none"), run.stop


def ends_of(folder: Path) -> frozenset[int]:
    """Tokens at which `generate` stops."""
    return frozenset(json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"])
