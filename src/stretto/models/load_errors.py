"""What libraries say against a model's files, in words for whoever named the model.

The files are a stranger's. Whatever is wrong with them ends in an exception of transformers, of tokenizers or of
PyTorch, which may be any; and a model that comes with Python of its own is refused, because that would run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stretto.errors import RecipeError, StrettoError

LANGUAGE_MODEL = "name a causal language model with a tokenizer"
OWN_CODE = "needs Python code of its own repository, and stretto runs no code of models"
OTHER_FAMILY = "name a model of a family that transformers knows by itself, or a GGUF file of this one"
PANIC = "PanicException"
"""What tokenizers and safetensors raise where their Rust gives up; it is no `Exception`."""


@contextmanager
def reading_model(name: str, *, failing: str = "could not be loaded", fix: str = LANGUAGE_MODEL) -> Iterator[None]:
    """Turns what is raised within into a RecipeError on `model.name`."""
    try:
        yield
    except (StrettoError, torch.OutOfMemoryError):  # said already, or not the files' fault
        raise
    except Exception as error:
        raise _refusal(name, error, failing, fix) from error
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise _refusal(name, error, failing, fix) from error


def _refusal(name: str, error: BaseException, failing: str, fix: str) -> RecipeError:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return RecipeError.of("model.name", f"{name} {OWN_CODE}", OTHER_FAMILY)
    if "weights_only" in text:
        reason = f"{name} {failing}: its pickle holds Python objects, and stretto unpickles tensors alone"
        return RecipeError.of("model.name", reason, "convert its weights to safetensors")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The first line of some says only that something is wrong, and the second what.
    told = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [type(error).__name__])[0]
    return RecipeError.of("model.name", f"{name} {failing}: {told[:300]}", fix)
