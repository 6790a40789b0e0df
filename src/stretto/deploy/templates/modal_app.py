"""Trains on Modal: modal run --detach app.py. What the run has made is in the volume, also after a preemption.

A container that is taken away is started again with the same call, and goes on with the run.
"""

import subprocess
from pathlib import Path

import modal

PROJECT = Path(__file__).resolve().parents[len(Path(@inside).parts)] if modal.is_local() else Path("/workspace")

app = modal.App(@name)
runs = modal.Volume.from_name(@volume, create_if_missing=True)
image = modal.Image.from_dockerfile(PROJECT / @dockerfile, context_dir=PROJECT)


@@app.function(
    image=image,
    @where,
    volumes={"/workspace/runs": runs},
    timeout=@seconds,
    retries=modal.Retries(max_retries=10, initial_delay=0.0),
)
def train() -> None:
    """Begins the run or goes on with it."""
    code = subprocess.run(["bash", "/opt/train.sh"], check=False).returncode
    runs.commit()
    if code:
        raise SystemExit(code)


@@app.local_entrypoint()
def main() -> None:
    """What `modal run` calls."""
    train.remote()
