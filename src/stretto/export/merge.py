"""An adapter merged into its base: a whole model in a folder that transformers, vLLM and a recipe read by themselves.

The sum is made in float32 and rounded once, to the type of the files. Rounding a young adapter into bfloat16 loses most
of it, so how much is lost is measured first, and the type follows from that unless the caller names one. No more than
a file's worth of weights is in memory, and for the proof one model in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stretto.errors import RecipeError
from stretto.export.proof import MOST_PROMPTS, ExportProof, ask_run, prove, refuse_other_base, unexplained_share
from stretto.export.saved_model import SavedModel
from stretto.export.weights import StoredWeights, TrainedWeights
from stretto.models.load import DTYPES, Policy
from stretto.storage.atomic import Disk, share, storing, to_json

AUTO = "auto"
KEPT = 0.1
"""Largest share of the update that rounding may lose before `auto` writes float32 instead of the base's type."""
LARGEST_FILE = 1 << 30
"""Bytes in a file of weights, and so about what is in memory while they are written."""
PROOF = "proof.json"
"""The file in an export that says how it compares with its run."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a merge came to."""

    folder: Path
    """The whole model."""
    step: int
    """The step of the checkpoint that was merged."""
    dtype: str
    """What its weights are stored in."""
    lost: float
    """Share of the adapter's update, by norm, that rounding to this type loses."""
    proof: ExportProof
    """How it compares with the run."""

    def document(self) -> dict[str, Any]:
        """As a file or a program reads it."""
        proof = self.proof.document()
        return {"folder": str(self.folder), "step": self.step, "dtype": self.dtype, "lost": self.lost, "proof": proof}


def merge(
    model: SavedModel,
    target: Path,
    *,
    dtype: str = AUTO,
    plain: bool = False,
    most: int = MOST_PROMPTS,
    note: Note,
    make: Callable[[SavedModel, Policy, bool], TrainedWeights] = TrainedWeights,
) -> Merged:
    """Writes the whole model to a folder that does not exist yet, once it is proved to be the run's.

    `plain` takes the base as it is stored where it was trained on in few bits. `make` makes the weights that are
    written; a test can make wrong ones.
    """
    if model.files.adapter is None:
        reason = f"{model.checkpoint} is a whole model already, because the run trained all of it"
        raise RecipeError.of(str(model.run), reason, "use that folder as it is")
    if target.exists():
        raise RecipeError.of("--to", f"{target} exists already", "name another folder, or remove it")
    tell_base(model, plain, note)
    policy = model.load("float32")
    weights = make(model, policy, plain)
    chosen, lost = choose_dtype(weights, dtype, note)
    draft = target.with_name(f".{target.name}.partial")
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        try:
            draft.mkdir()
            run = ask_run(model, policy, most=most)
            write_weights(weights, draft, DTYPES[chosen])
            write_settings(model, policy, draft, chosen)
            compared = StoredWeights(draft).read, lambda _, weight: stored_as(weight, DTYPES[chosen])
            refuse_other_base(weights, weights.names, *compared)
            unexplained = unexplained_share(policy, weights, *compared)
            del policy, weights
            proof = prove(run, draft, exact=chosen in ("float32", "float64") and not plain, unexplained=unexplained)
            merged = Merged(folder=target, step=model.step, dtype=chosen, lost=lost, proof=proof)
            (draft / PROOF).write_text(to_json(merged.document(), indent=2), encoding="ascii")
            settle(draft, target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return merged


def tell_base(model: SavedModel, plain: bool, note: Note) -> None:
    """Says what becomes of a base in few bits."""
    refuse_plain(model, plain)
    kind = model.recipe.model.quantize
    if kind == "none":
        return
    if plain:
        note(f"trained on the base in {kind} and put on it as it is stored: answers differ by what {kind} rounds off")
    else:
        note(f"the base is written as the run has read it in {kind}, made wide; --plain-base takes it as it is stored")


def refuse_plain(model: SavedModel, plain: bool) -> None:
    """RecipeError if the base as it is stored is asked for where there is no other."""
    if plain and model.recipe.model.quantize == "none":
        reason = "asks for the base as it is stored, and the run has trained on no other"
        raise RecipeError.of("--plain-base", reason, "leave it out")


def settle(draft: Path, target: Path) -> None:
    """Gives a finished folder or file its name, once all of it is on the medium and may be read by others."""
    if draft.is_dir():
        share(draft)
        for path in (*draft.rglob("*"), draft):
            Disk().sync(path)
    else:
        Disk().sync(draft)
    draft.rename(target)


def choose_dtype(weights: TrainedWeights, dtype: str, note: Note) -> tuple[str, float]:
    """The type to write, and the share of the update that it loses; without an adapter, the stored type."""
    first = next(iter(weights.updates), weights.names[0])
    stored = str(weights.stored.read(first).dtype).removeprefix("torch.")
    wanted = stored if dtype == AUTO else dtype
    lost = lost_share(weights, DTYPES[wanted])
    if dtype == AUTO and lost > KEPT:
        note(f"rounding to {wanted}, the base's type, would lose {lost:.2g} of what was trained; float32 is written")
        return "float32", lost_share(weights, torch.float32)
    if lost > KEPT:
        note(f"rounding to {wanted} loses {lost:.2g} of what was trained; --dtype float32 keeps it")
    return wanted, lost


def lost_share(weights: TrainedWeights, dtype: torch.dtype) -> float:
    """The norm of what rounding the changed weights to a type loses, relative to the norm of the update.

    What the base itself loses is left out: of a base in a wider type than `dtype`, the error is that of the sum.
    """
    lost = update = 0.0
    for name, change in weights.updates.items():
        whole = weights.read(name)
        lost += float((whole.to(dtype).float() - whole).double().square().sum())
        update += float(change.whole().double().square().sum())
    return (lost / update) ** 0.5 if update else 0.0


def write_weights(weights: TrainedWeights, folder: Path, dtype: torch.dtype) -> None:
    """The weights as transformers' files, each floating-point one in `dtype`."""
    files, index = list(_files_of(weights, dtype.itemsize)), dict[str, str]()
    total = 0
    for number, names in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {each: stored_as(weights.read(each), dtype) for each in names}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(names, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")


def stored_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the type of the files; whole numbers stay what they are."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _files_of(weights: TrainedWeights, itemsize: int) -> Iterator[list[str]]:
    """Names of weights, file by file."""
    names, size = list[str](), 0
    for name in weights.names:
        bytes_of = torch.Size(weights.stored.shape(name)).numel() * itemsize
        if names and size + bytes_of > LARGEST_FILE:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_of
    yield names


def write_settings(model: SavedModel, policy: Policy, folder: Path, dtype: str) -> None:
    """Configuration, tokenizer with the run's chat template, and how answers are generated: they end as the run's."""
    config = json.loads((model.folder / "config.json").read_text("utf-8"))
    config.pop("torch_dtype", None)  # what older versions of transformers call it
    _write_json(folder / "config.json", config | {"dtype": dtype})
    write_ends(model.folder, policy, folder)
    policy.tokenizer.save_pretrained(folder)


def write_ends(own: Path, policy: Policy, folder: Path) -> None:
    """How answers are generated, as the folder `own` says it, and all tokens that end an answer of the run."""
    name = "generation_config.json"
    settings = json.loads((own / name).read_text("utf-8")) if (own / name).is_file() else {}
    _write_json(folder / name, settings | {"eos_token_id": sorted(policy.stop_tokens)})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
