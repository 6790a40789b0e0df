"""The sections about the run: where models live, what is evaluated and kept, when it stops, how long it waits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.recipe.schema.base import Count, Natural, NotNegative, Positive, Seconds, Section, Share


class Placement(Section):
    """Where the models live."""

    strategy: str = "auto"
    """flatten, interleave, separate, elastic, or auto: the one that `stretto plan` finds to be the fastest."""
    cluster: str = "auto"
    """auto (one device: the first GPU, or the CPU), 1xcpu, 1xgpu (one of any kind; to plan for, or of several, name the
    kind), 8xH100, 1xcpu+1xcpu2 (of 1 and 2 threads), or a file."""
    fractions: Literal["I1", "I2"] | tuple[Share, ...] | dict[str, Share] | None = None
    """interleave: share of the devices of actor, critic, reference and reward model, or a preset; default I1. Or groups
    that lie side by side, such as {actor+reference: 0.75, critic+reward: 0.25}."""
    staleness: Natural = 0
    """Versions the sampler may lag behind: 1 generates the next batch while this one is trained on (separate)."""
    cells: tuple[dict[str, Any], ...] | None = None
    """A plan by hand."""
    nccl: bool = False
    """GPUs: between cells, gradients and weights pass from card to card by NCCL, not through host memory; not tried on
    GPUs yet. Within a cell of several GPUs all passes by NCCL in any case."""
    price_per_gpu_hour: NotNegative | None = None
    """For the cost of a step in plans and at the end of a run."""


EVALUATED = 100
"""Max number of held-out prompts where a recipe does not state it."""


class Evaluate(Section):
    """Greedy accuracy on the held-out prompts."""

    every: Natural = 10
    """Steps between evaluations, step 0 and the last included; 0 for none."""
    prompts: Literal["auto"] | Count = "auto"
    """How many held-out prompts. `auto`: all of them, at most 100."""
    pass_k: Count = 1
    """Also sample k answers per prompt and report pass@k."""

    @property
    def limit(self) -> int:
        """Max number of held-out prompts per evaluation."""
        return EVALUATED if self.prompts == "auto" else self.prompts


class CheckpointSection(Section):
    """What is kept of a run."""

    every: Count = 10
    """Steps between checkpoints; the last step always has one."""
    keep: Count = 3
    """How many to keep."""
    best: str | None = "eval/accuracy"
    """A metric whose best checkpoint is kept besides, or null."""


class Guards(Section):
    """When a run should stop rather than go on."""

    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop, or skip the update and count it."""
    reward_error_share: Share = 0.1
    """Share of a step's trajectories, and of an evaluation's answers, whose reward may fail."""
    max_k3: Positive | None = 0.05
    """Largest mean k3 between engine and trainer."""
    min_entropy: NotNegative | None = None
    """Smallest mean entropy of the sampled tokens' distributions."""
    rehearsal: Literal["auto"] | bool = "auto"
    """Try the largest row, an update, a publish and a save before the first step; auto does so on GPUs."""
    min_disk_gb: NotNegative = 2.0
    """Free disk below which a run does not start or checkpoint."""
    reward_collapse: Share | None = 0.5
    """Warn when the mean reward of ten steps is below its best by this share, of the best or of what was gained."""
    entropy_collapse: Share | None = 0.1
    """Warn when the entropy of ten steps is below this share of that of the first ten."""
    mismatch_growth: Positive | None = 10.0
    """Warn when the mean k3 between engine and trainer is so many times that of the first ten steps."""
    loop_lag: Seconds | None = 5.0
    """Warn when the event loop, in which environments run, was blocked so many seconds."""
    memory_growth: Positive | None = 0.5
    """Warn when the memory of this process has grown by this share since its first steps."""
    warn_disk_gb: NotNegative | None = 4.0
    """Warn when less disk is free."""
    stop_on: tuple[
        Literal["reward_collapse", "entropy_collapse", "mismatch_growth", "loop_lag", "memory_growth", "warn_disk_gb"],
        ...,
    ] = ()
    """Which of these warnings end the run, after a checkpoint, instead."""


class Deadlines(Section):
    """Seconds each wait may take."""

    start: Seconds = 300.0
    """Loading and starting; also importing a module of yours."""
    environment: Seconds = 60.0
    """One call of user code in an environment; single calls are not limited yet."""
    generate: Seconds = 600.0
    """Generating one step."""
    reward: Seconds = 60.0
    """Waiting for the next verdict while trajectories are scored."""
    train: Seconds = 600.0
    """Training one step."""
    publish: Seconds = 120.0
    """Publishing the weights."""
    checkpoint: Seconds = 3600.0
    """A checkpoint that is waited for: the one before it, or the last."""


class RunSection(Section):
    """How long, and where to."""

    steps: Count = 40
    """Steps."""
    folder: Annotated[str, Field(min_length=1)] = "auto"
    """auto: runs/<recipe>-<NNN>, the next free one; an explicit folder must not exist."""
    until: str | None = None
    """Save and stop in time: a duration of this session (3h30m), or a time with its zone (06:30Z, 18:00+02:00). The end
    of a job that $SLURM_JOB_END_TIME tells counts as well."""
    report: bool = True
    """Keep report.html in the run's folder up to date."""
    reward_workers: Literal["auto"] | Count = "auto"
    """Processes that run reward functions and tools, and programs in the sandbox at a time; auto: half of the cores, at
    least 4 processes and 2 programs, at most 16. More help where these wait, such as for a judge that is asked over a
    network."""
    callbacks_strict: bool = False
    """A callback given to `stretto.train` that raises ends the run; otherwise that is told once and the run goes on."""
