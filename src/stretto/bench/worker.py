"""The process in which one job is done: `python -m stretto.bench.worker JOB RESULT`, two JSON files.

It imports what the side needs, looks at its memory, does the job, and looks again. A failure that we raise on purpose
is written into the result; any other ends the process with a traceback, which the bench keeps and quotes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from stretto.bench.jobs import SIDES, job_from, with_memory
from stretto.bench.machine import PeakMemory
from stretto.errors import StrettoError


def main(arguments: Sequence[str]) -> int:
    """Does the job in the first file and writes the second."""
    asked, answer = map(Path, arguments)
    job = job_from(json.loads(asked.read_text(encoding="utf-8")))
    if job.side != "prepare":  # everything else is on this disk by then
        os.environ["HF_HUB_OFFLINE"] = "1"
    module, _, name = SIDES[job.side].partition(":")
    side = getattr(import_module(module), name)
    import torch

    from stretto.models.load import choose_device

    torch.set_num_threads(job.threads)
    memory = PeakMemory(choose_device("auto").type)
    try:
        result = asdict(with_memory(side(job), memory.gained()))
    except StrettoError as error:
        result = {"error": str(error)}
    draft = answer.with_suffix(".draft")
    draft.write_text(json.dumps(result), encoding="utf-8")
    draft.rename(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
