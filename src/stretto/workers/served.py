"""How a worker comes to a server of the user's, which reads adapters below the run's folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stretto.checks.machine.engine_python import server_api
from stretto.engines.served.engine import ServedEngine
from stretto.models.load import Policy
from stretto.recipe.schema import ApartEngineSection
from stretto.workers.vllm import logs_of, patience_of
from stretto.workers.worker_spec import WorkerSpec


def served_engine(policy: Policy, section: ApartEngineSection, url: str, spec: WorkerSpec) -> ServedEngine:
    """What generates with the policy's adapter there."""
    api = server_api(section, url)
    served = api.facts()
    room = Path(tempfile.mkdtemp(prefix="adapters-", dir=logs_of(spec))).resolve()
    room.chmod(0o755)  # the server may be another user's
    return ServedEngine(
        policy,
        api,
        room=room,
        context=min(policy.context, served.context),
        deadlines=patience_of(spec),
        processed=spec.recipe.engine.temperature != 1.0,
    )
