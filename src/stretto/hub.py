"""The Hugging Face hub, asked once whether it has a model or a dataset.

Its libraries try a hub that cannot be reached again and again, for half a minute, before they say so.
"""

from __future__ import annotations

from typing import Literal

from stretto.errors import Problem, RecipeError

SECONDS = 10.0
"""How long it may take to say that something exists."""


class HubUnreachable(RecipeError):
    """Nobody can say from here whether it exists."""


def ask(what: Literal["model", "dataset"], name: str, *, field: str, instead: str) -> None:
    """Raises a RecipeError if it has no such thing for this user, or cannot be reached; `instead` is what may be named
    that is on this machine. Nothing is asked where HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        hub = HfApi()
        (hub.model_info if what == "model" else hub.dataset_info)(name, timeout=SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = f"the hub has no {what} {name[:60]!r} that you may read"
        raise RecipeError.of(field, reason, f"correct the name, or log in; {instead}") from error
    except HfHubHTTPError:  # it answers: what is wrong is said where it is downloaded
        return
    except Exception as error:  # of httpx, of sockets, of the proxy: the reason is in the text
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = f"the hub cannot be reached: {said[:300]}"
        fix = f"connect this machine, or set HF_HUB_OFFLINE=1 to use what was downloaded before; {instead}"
        raise HubUnreachable(Problem(field=field, reason=reason, fix=fix)) from error
