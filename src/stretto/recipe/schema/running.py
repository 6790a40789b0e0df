"""Sections of the run: placement, evaluation, checkpoints, guards, deadlines, length and folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.recipe.schema.base import Count, Natural, NotNegative, Positive, Seconds, Section, Share


class Placement(Section):
    """Devices and the placement of models on them."""

    strategy: str = "auto"
    """flatten, interleave, separate, elastic, or auto: the fastest by `stretto plan`."""
    cluster: str = "auto"
    """Devices: auto (the first GPU, else the CPU), e.g. 1xcpu, 1xgpu, 8xH100, 2x8xH100, 1xcpu+1xcpu2 (1 and 2
    threads), or a file. Plans and multi-GPU runs need the GPU model."""
    fractions: Literal["I1", "I2"] | tuple[Share, ...] | dict[str, Share] | None = None
    """Strategy interleave: share of devices for actor, critic, reference and reward model, or a preset. Unset: I1. A
    mapping places groups of roles side by side, e.g. {actor+reference: 0.75, critic+reward: 0.25}."""
    staleness: Natural = 0
    """Max lag of the sampling weights in versions. 1: generate the next batch while training on this one (strategy
    separate)."""
    cells: tuple[dict[str, Any], ...] | None = None
    """Manual plan: a list of cells, as in plan.json."""
    nccl: bool = False
    """Send gradients and weights between cells by NCCL instead of host memory. Untested on GPUs."""
    price_per_gpu_hour: NotNegative | None = None
    """Price of one GPU hour, for cost estimates of plans and runs."""


EVALUATED = 100
"""Max number of held-out prompts where a recipe does not state it."""


class Evaluate(Section):
    """Greedy accuracy on held-out prompts."""

    every: Natural = 10
    """Steps between evaluations; step 0 and the last step are always evaluated. 0 disables evaluation."""
    prompts: Literal["auto"] | Count = "auto"
    """Number of held-out prompts per evaluation. `auto`: all of them, at most 100."""
    pass_k: Count = 1
    """Samples per prompt for pass@k, at the training temperature. 1: greedy accuracy alone."""

    @property
    def limit(self) -> int:
        """Max number of held-out prompts per evaluation."""
        return EVALUATED if self.prompts == "auto" else self.prompts


class CheckpointSection(Section):
    """Checkpoint schedule and retention."""

    every: Count = 10
    """Steps between checkpoints. The last step is always saved."""
    keep: Count = 3
    """Number of newest checkpoints to keep."""
    best: str | None = "eval/accuracy"
    """Metric whose best checkpoint is also kept; `null` disables it."""


class Guards(Section):
    """Conditions that stop a run or log a warning."""

    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient: stop the run, or skip the update and count it."""
    reward_error_share: Share = 0.1
    """Max share of failed rewards per step or evaluation before the run stops."""
    max_k3: Positive | None = 0.05
    """Stop when the mean KL (k3) between engine and trainer exceeds this value. `null` disables it."""
    min_entropy: NotNegative | None = None
    """Stop when the mean token entropy falls below this value. `null` disables it."""
    rehearsal: Literal["auto"] | bool = "auto"
    """Run the largest microbatch, an update, a weight sync and a save before the first step. `auto`: on GPUs."""
    min_disk_gb: NotNegative = 2.0
    """Min free disk space in GB to start or to save a checkpoint."""
    reward_collapse: Share | None = 0.5
    """Warn when the ten-step mean reward falls by this share of its best value or of its gain."""
    entropy_collapse: Share | None = 0.1
    """Warn when the ten-step mean entropy falls below this share of its first ten-step mean."""
    mismatch_growth: Positive | None = 10.0
    """Warn when the engine-trainer k3, averaged over ten steps, exceeds this multiple of its average over the first
    ten."""
    loop_lag: Seconds | None = 5.0
    """Warn when the event loop was blocked for this many seconds."""
    memory_growth: Positive | None = 0.5
    """Warn when host memory of the main process has grown by this share since the first steps."""
    warn_disk_gb: NotNegative | None = 4.0
    """Warn below this free disk space in GB."""
    stop_on: tuple[
        Literal["reward_collapse", "entropy_collapse", "mismatch_growth", "loop_lag", "memory_growth", "warn_disk_gb"],
        ...,
    ] = ()
    """Warnings that stop the run after a checkpoint instead."""


class Deadlines(Section):
    """Time limits in seconds. A wait that exceeds its limit ends the run with exit code 3."""

    start: Seconds = 300.0
    """Loading models and starting workers; also the import of your modules."""
    environment: Seconds = 60.0
    """One call of user code in an environment. Not enforced yet; `environment.deadline` limits a trajectory."""
    generate: Seconds = 600.0
    """Generation of one step."""
    reward: Seconds = 60.0
    """Wait for the next reward while trajectories are scored."""
    train: Seconds = 600.0
    """Training of one step."""
    publish: Seconds = 120.0
    """Weight sync."""
    checkpoint: Seconds = 3600.0
    """Wait for a checkpoint: the previous one or the last."""


class RunSection(Section):
    """Length of the run, its folder and processes."""

    steps: Count = 40
    """Number of training steps."""
    folder: Annotated[str, Field(min_length=1)] = "auto"
    """Run folder. auto: runs/<recipe>-<NNN>, the next free number. An explicit folder must not exist."""
    until: str | None = None
    """Time limit: a duration of this session (3h30m), or a time with zone (06:30Z, 18:00+02:00). The run saves and
    stops before it. $SLURM_JOB_END_TIME also counts."""
    report: bool = True
    """Keep report.html in the run folder up to date."""
    reward_workers: Literal["auto"] | Count = "auto"
    """Number of processes for reward functions and tools, and of parallel sandbox programs. auto: half of the cores,
    at least 4 processes and 2 programs, at most 16. Raise it for rewards that wait on a network."""
    callbacks_strict: bool = False
    """End the run when a callback of `stretto.train` raises. False: log the first failure and continue."""
