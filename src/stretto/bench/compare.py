"""The benches: which jobs a case takes, and the rows that follow from what they measured.

Every ratio is of two sides measured in the same run: time against the peer's fastest setting, memory against its
leanest. A setting for which the machine has too little memory is left out and named; at least one must work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.bench.cases import STUDY_NAME, STUDY_SECONDS, BenchCase
from stretto.bench.flops import ModelSizes, Pass, answers_to, forward
from stretto.bench.flops import step as step_flops
from stretto.bench.jobs import Job, JobResult, Run
from stretto.errors import StrettoError

Note = Callable[[str], None]
Row = dict[str, Any]
Replay = dict[str, dict[str, float]]

NORMS_APART = {"float32": 1e-3, "bfloat16": 0.05}
"""What the gradient norms of the same tokens may differ by, relative to the larger. In bf16 the peer's is a bf16 number
made of bf16 gradients; up to 2.3 % were measured."""

VALUES_APART = 1e-5
"""What mean rewards and losses of the same tokens may differ by: the peer's are fp32 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What all cases of a bench have in common."""

    model: str
    """The model as a recipe names it."""
    shape: str | None = None
    """The shape of random weights, instead of a model."""
    folder: Path
    """Where files of the bench go; somebody else's to remove."""
    threads: int
    """Threads of every side."""
    steps: int
    """Repetitions that count."""
    turns: int
    """How often the sides take turns: a machine that slows down for a while must not do it for one side only."""
    batches: tuple[int, ...]
    """Answers that the peer of `step` trains at once, each tried."""
    peer: str = "trl"
    """What a step stands beside: trl, or plain where that is not installed."""
    vllm: bool = False
    """Whether a rollout stands beside vLLM too, because there is a Python that has it."""
    run: Run
    """Has a job done."""
    note: Note
    """Told what happens."""


class CaseJobs:
    """The jobs of one case."""

    def __init__(self, setting: BenchSettings, case: BenchCase) -> None:
        self.setting, self.case = setting, case
        self.job = Job(
            side="prepare",
            case=case,
            model=setting.model,
            folder=str(setting.folder / case.name),
            threads=setting.threads,
            steps=setting.steps,
            shape=setting.shape,
        )
        self.facts = self.measure("prepare").facts
        if why := self.facts.get("slow"):
            setting.note(
                f"{case.name}: {why}, so both sides will take long; a case in fp32 says more about this machine"
            )
        self.job = replace(self.job, model=self.facts["model"])
        self.sizes = ModelSizes(**self.facts["sizes"])

    def measure(self, side: str, batch: int | None = None, *, plans: tuple[str, ...] = ()) -> JobResult:
        """What a side comes to, told when it is there."""
        found = self.setting.run(replace(self.job, side=side, batch=batch, plans=plans))
        text = f"{found.best:.2f} s, {found.memory / 2**30:.2f} GB" if found.seconds else "done"
        about = f", batch {batch}" if batch is not None else "".join(f" {name}" for name in plans)
        self.setting.note(f"{self.case.name}: {side}{about}: {text}")
        return found

    def measure_in_turns(self, sides: Sequence[tuple[str, int | None]]) -> tuple[list[JobResult], dict[str, str]]:
        """What each of some (side, batch) comes to, best of its turns, and why those that do not work did not."""
        found: dict[tuple[str, int | None], list[JobResult]] = {}
        failed: dict[str, str] = {}
        for _ in range(self.setting.turns):
            for side, batch in sides:
                if f"batch {batch}" in failed:
                    continue
                try:
                    found.setdefault((side, batch), []).append(self.measure(side, batch))
                except StrettoError as error:
                    if batch is None:
                        raise
                    failed[f"batch {batch}"] = str(error)
                    self.setting.note(str(error))
        best = [together(found[each]) for each in sides if found.get(each)]
        if len(failed) == sum(batch is not None for _, batch in sides) > 0:
            raise StrettoError("; ".join(failed.values()))
        return best, failed

    def common(self, ours: JobResult, peer: JobResult) -> Row:
        """What stands beside every figure of the case."""
        return {
            "model": self.setting.shape or self.setting.model,
            "device": self.facts["device"],
            "dtype": self.case.dtype,
            "trained_weights": "adapter" if self.case.adapter else "all",
            "prompt_tokens": self.facts["prompt"],
            "prompts": self.case.prompts,
            "samples": self.case.samples,
            "tokens_generated": {"stretto": ours.generated, "peer": peer.generated},
        }

    def efficiency(self, flops: dict[str, int], ours: float, peer: float) -> Row:
        """Arithmetic and how fast it was done: ours of the shared work, the peer's of the unshared, which it does."""
        done = {"stretto": flops["shared"] / ours / 1e9, "peer": flops["unshared"] / peer / 1e9}
        rate = self.facts["rate"]
        return {
            "flops": flops,
            "gflops_per_second": done,
            "matmul_gflops_per_second": rate,
            "share_of_matmul_rate": {side: each / rate for side, each in done.items()},
        }


def together(turns: Sequence[JobResult]) -> JobResult:
    """One side's turns: the seconds of all of them, the rest from the fastest, and the most memory of any."""
    fastest = min(turns, key=lambda turn: turn.best)
    seconds = tuple(second for turn in turns for second in turn.seconds)
    return replace(fastest, seconds=seconds, memory=max(turn.memory for turn in turns))


def rollout_rows(setting: BenchSettings, case: BenchCase) -> list[Row]:
    """Tokens per second of generation."""
    desk = CaseJobs(setting, case)
    sides = ["stretto rollout", "generate rollout", *["vllm rollout"] * setting.vllm]
    (ours, *peers), _ = desk.measure_in_turns([(side, None) for side in sides])
    flops = {kind: forward(desk.sizes, Pass(**generate)) for kind, (generate, _) in ours.facts["work"].items()}
    rows = []
    for peer in peers:
        equal_work(ours, peer)
        rates = ours.generated / ours.best, peer.generated / peer.best
        row = figure(case, "tokens/s", *rates, peer_name=peer.name, ratio=rates[0] / rates[1])
        row |= {
            "divergences_per_1000_tokens": ours.facts["divergences"],
            "draft_divergences_per_1000_tokens": ours.facts["draft_divergences"],
            "seconds": {"stretto": ours.best, "peer": peer.best},
        }
        rows.append(row | desk.common(ours, peer) | desk.efficiency(flops, ours.best, peer.best))
    return rows


def step_rows(setting: BenchSettings, case: BenchCase) -> list[Row]:
    """Seconds of a step, and its peak memory."""
    desk = CaseJobs(setting, case)
    sides = [("stretto step", None), *((f"{setting.peer} step", batch) for batch in setting.batches)]
    (ours, *peers), failed = desk.measure_in_turns(sides)
    replay = equal_replay(ours, desk.measure(f"{setting.peer} replay", min(setting.batches)), case.dtype)
    for peer in peers:
        equal_work(ours, peer)
    fastest, leanest = min(peers, key=lambda peer: peer.best), min(peers, key=lambda peer: peer.memory)
    flops = {
        kind: step_flops(desk.sizes, *(Pass(**each) for each in passes)) for kind, passes in ours.facts["work"].items()
    }
    time = figure(case, "s/step", ours.best, fastest.best, peer_name=fastest.name, ratio=fastest.best / ours.best)
    time |= {
        "seconds": {each.name: {"step": each.best, **each.stages} for each in (ours, *peers)},
        "replay": replay,
        "failed": failed,
    }
    gigabytes = max(1, ours.memory) / 2**30, leanest.memory / 2**30
    memory = figure(case, "GB at the peak", *gigabytes, peer_name=leanest.name, ratio=gigabytes[1] / gigabytes[0])
    memory |= {"memory": {each.name: each.memory / 2**30 for each in (ours, *peers)}}
    return [
        row
        | desk.common(ours, peer)
        | {"tokens_trained": {"stretto": ours.trained, "peer": peer.trained}}
        | desk.efficiency(flops, ours.best, peer.best)
        for row, peer in ((time, fastest), (memory, leanest))
    ]


def study_rows(setting: BenchSettings, case: BenchCase) -> list[Row]:
    """Seconds of a step, beside those that were published of it; measured elsewhere, so nothing else is compared."""
    desk = CaseJobs(setting, case)
    ours = desk.measure("stretto study")
    answers = answers_to(ours.facts["prompts"], case.values, case.answer or 0)
    flops = {}
    for kind, passes in ours.facts["work"].items():
        generate, train = (Pass(**each) for each in passes)
        flops[kind] = step_flops(desk.sizes, generate, train) + forward(desk.sizes, train)  # the reference's forward
        flops[kind] += forward(desk.sizes, answers[kind]) if case.values else 0
    rate, done = desk.facts["rate"], flops["shared"] / ours.best / 1e9
    time = figure(case, "s/step", ours.best, STUDY_SECONDS, peer_name=STUDY_NAME, ratio=STUDY_SECONDS / ours.best)
    time |= desk.common(ours, ours) | {
        "tokens_trained": {"stretto": ours.trained, "peer": ours.trained},
        "optimizer": case.optimizer,
        "reference_answers": case.values,
        "flops": flops,
        "gflops_per_second": {"stretto": done},
        "matmul_gflops_per_second": rate,
        "share_of_matmul_rate": {"stretto": done / rate},
        "seconds": {ours.name: {"step": ours.best, **ours.stages}},
        "memory": {ours.name: ours.memory / 2**30},
    }
    return [time]


def figure(case: BenchCase, unit: str, ours: float, peer: float, *, peer_name: str, ratio: float) -> Row:
    """What every row begins with; a ratio above 1 is where stretto is better."""
    return {
        "case": case.name,
        "unit": unit,
        "stretto": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": ratio,
    }


def equal_work(ours: JobResult, peer: JobResult) -> None:
    """Refuses to compare sides that did not do the same."""
    if (ours.generated, ours.trained) != (peer.generated, peer.trained):
        raise StrettoError(
            f"bench: the work was not equal: stretto generated {ours.generated} and trained {ours.trained} tokens, "
            f"{peer.name} {peer.generated} and {peer.trained}"
        )


def equal_replay(ours: JobResult, peer: JobResult, dtype: str) -> Replay:
    """What each side made of the same tokens; refuses to compare sides for which that is not the same."""
    replay: Replay = {
        name: {"stretto": ours.facts["replay"][name], "peer": peer.facts["replay"][name]}
        for name in ("reward", "loss", "grad_norm")
    }
    for name, sides in replay.items():
        one, other = sides["stretto"], sides["peer"]
        bound = NORMS_APART[dtype] * max(abs(one), abs(other)) if name == "grad_norm" else VALUES_APART
        if not abs(one - other) <= bound:  # so that NaN is refused too
            raise StrettoError(
                f"bench: the same tokens gave other numbers in {dtype}: {name} is {one:.6g} for stretto and "
                f"{other:.6g} for {peer.name}, and may differ by {bound:.1g}"
            )
    return replay
