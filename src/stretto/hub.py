"""The Hugging Face hub, asked once whether it has a model or a dataset.

Its libraries try a hub that cannot be reached again and again, for half a minute, before they say so.
"""

from __future__ import annotations

from typing import Literal

from stretto.errors import Problem, RecipeError

SECONDS = 10.0
"""How long it may take to say that something exists."""


UNANSWERED: set[str] = set()
"""What this process asked for last without an answer."""


class HubUnreachable(RecipeError):
    """Nobody can say from here whether it exists."""

    @property
    def silent(self) -> bool:
        """True if nobody answered at all, such as where there is no network; false of an answer that makes no sense."""
        kinds = {kind.__name__ for kind in type(self.__cause__).__mro__}
        # Of sockets, or of whichever httpx the hub's library has; a status that says no is an OSError there, too.
        return "HfHubHTTPError" not in kinds and bool(kinds & {"OSError", "TransportError"})


def ask(what: Literal["model", "dataset"], name: str, *, field: str, instead: str) -> None:
    """Raises a RecipeError if it has no such thing for this user, or cannot be reached; `instead` is what may be named
    that is on this machine. Nothing is asked where HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    UNANSWERED.discard(name)
    try:
        hub, seconds = HfApi(), max(SECONDS, constants.HF_HUB_ETAG_TIMEOUT)
        (hub.model_info if what == "model" else hub.dataset_info)(name, timeout=seconds)
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = f"the hub has no {what} {name[:60]!r} that you may read"
        raise RecipeError.of(field, reason, f"correct the name, or log in; {instead}") from error
    except Exception as error:  # of httpx, of sockets, of the proxy: the reason is in the text
        UNANSWERED.add(name)
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = f"the hub cannot be reached: {said[:300]}"
        fix = f"connect this machine, or set HF_HUB_OFFLINE=1 to use what was downloaded before; {instead}"
        raise HubUnreachable(Problem(field=field, reason=reason, fix=fix)) from error
