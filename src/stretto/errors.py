"""One exception tree, drawn here, so that a failure is named by the boundary it crossed.

    StrettoError                    exit code 1: the run failed
    +-- RecipeError                 exit code 2: the recipe or the arguments are wrong; carries all Problems of its tier
    +-- DeadlineError               exit code 3: a wait had a deadline, and it passed
    +-- SandboxError                user code in a worker process raised, or its process died
    |   +-- SandboxDeadlineError    ... or did not answer in time, and its process was killed
    |   |   +-- SandboxStartError   ... or was not imported in time
    |   +-- SandboxDiedError        ... or its process died by itself
    |       +-- SandboxLimitError   ... or came to the limit of its processor time or memory
    +-- RewardError                 more rewards failed than the recipe allows; carries the first failure
    |   +-- VerdictError            one trajectory could not be judged; it is marked and dropped, never given 0
    +-- RolloutError                a conversation with the model could not be completed
    +-- WorkerLost                  a worker's process died; its work is done again
    +-- EngineError                 the generating side failed
    |   +-- EngineDiedError         ... because the process that an engine runs in has ended; it is started again
    +-- TrainingError               the training side failed (a non-finite loss, no memory for one conversation)
    |   +-- StateLostError          ... or what only its processes held is gone with them
    |   +-- LostTouchError          ... or another process has left, or does not answer: why, that one says
    +-- WeightsError                sampler and trainer do not hold the same weights
    +-- StaleSampleError            a sample came from another version of the weights than the one being trained
    +-- CheckpointError             a checkpoint is missing, torn or lacks a part
    +-- GuardError                  a guard of the recipe stopped the run
    +-- UnreadableFileError         also an OSError: a file of a run is a pipe, a device, a folder or far too large
    +-- ExportError                 what was made of a run's model does not answer as the run does, so it is not kept
    ChangedInputsError              both RecipeError and CheckpointError: what a run reads is not what it read before

A run that was asked to end ends with RunStopped, which is a KeyboardInterrupt and no error: nothing has failed.

The command line turns any of these into readable lines; a traceback on a user's screen is a bug of ours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a recipe: where, why, and what to do about it."""

    field: str
    """Dotted name of the recipe key (or the file) at fault."""
    reason: str
    """What is wrong with it, in one sentence."""
    fix: str
    """What the user can do, in one sentence."""

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}\n    fix: {self.fix}"


class StrettoError(Exception):
    """Anything stretto raises on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UnreadableFileError(StrettoError, OSError):
    """A file of a run is a pipe, a device, a folder, or far too large."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(f"{path}: cannot be read ({why})\n    fix: make it a file that you may read, then try again")
        self.strerror = why


class RunStopped(KeyboardInterrupt):
    """A run has ended before its last step because it was asked to, and its checkpoint is written if one is due.

    The message says where it stands and how to go on. `exit_code` is what the command line returns: 130 after Ctrl-C,
    143 after SIGTERM or at the end of the run's time, 129 after SIGHUP. `why` is what asked: a signal, or what says how
    much time there is.
    """

    def __init__(self, text: str, *, exit_code: int, why: str) -> None:
        super().__init__(text)
        self.exit_code, self.why = exit_code, why


class RecipeError(StrettoError):
    """The recipe or the arguments are wrong; every problem of the tier is in `problems`."""

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    @property
    def reasons(self) -> str:
        """Its problems in one line, without what would mend them."""
        return "; ".join(f"{problem.field}: {problem.reason}" for problem in self.problems)

    def __reduce__(self) -> tuple[type[RecipeError], tuple[Problem, ...]]:
        """As it was made, so that it can be sent between processes."""
        return type(self), self.problems

    @classmethod
    def of(cls, field: str, reason: str, fix: str) -> RecipeError:
        """The common case of a single problem."""
        return cls(Problem(field=field, reason=reason, fix=fix))


class DeadlineError(StrettoError):
    """A wait passed its deadline; the message names the stage, since when, and the last progress."""

    exit_code = 3


class SandboxError(StrettoError):
    """User code in a worker process raised or its process died; the message carries what it said."""


class SandboxDeadlineError(SandboxError):
    """User code did not answer within its deadline and its process was killed."""


class SandboxStartError(SandboxDeadlineError):
    """A worker process did not start, or a module was not imported, in the time for starting. No call has run yet."""


class SandboxDiedError(SandboxError):
    """The worker process died while user code ran: killed from outside, out of memory, or it left by itself."""


class SandboxLimitError(SandboxDiedError):
    """A call used up the processor time or the memory that it was given; other calls are not to blame."""


class RewardError(StrettoError):
    """More rewards failed than `guards.reward_error_share` allows."""

    batch: object = None
    """The step's `StepBatch`, where a step failed: its trajectories are still to be written down."""


class VerdictError(RewardError):
    """One trajectory could not be judged. The message is what the trajectory is marked with."""


class RolloutError(StrettoError):
    """A trajectory could not be completed: not the model's fault, so never a reward of 0."""


class WorkerLost(StrettoError):
    """The process of a cell's device died. What it had is done again elsewhere, or by its successor."""

    def __init__(self, cell: str, why: str) -> None:
        super().__init__(cell, why)  # both, so that it can be sent between processes
        self.cell, self.why = cell, why

    def __str__(self) -> str:
        return f"{self.cell}: {self.why}"


class EngineError(StrettoError):
    """The generating side failed."""


class EngineDiedError(EngineError):
    """The process that an engine runs in has ended; the message has the last lines that it said."""


class TrainingError(StrettoError):
    """The training side failed."""


class StateLostError(TrainingError):
    """No process that is left holds all that training goes on from; the newest checkpoint does."""


class LostTouchError(TrainingError):
    """A process has waited for another that has left, died or hangs; it does not know why."""


class WeightsError(StrettoError):
    """Sampler and trainer do not hold the same weights."""


class StaleSampleError(StrettoError):
    """A sample was drawn from another version of the weights than the one being trained."""


class CheckpointError(StrettoError):
    """A checkpoint is missing, torn, or lacks a part that the run needs.

    `damaged` is False where it may be whole: a newer version wrote it, or it cannot be read at the moment.
    """

    def __init__(self, text: str, *, damaged: bool = True) -> None:
        super().__init__(text)
        self.damaged = damaged


MODEL_FAILURES = (WorkerLost, DeadlineError, EngineError, WeightsError)
"""What a call of the model fails with that no environment is to blame for: it ends more than a trajectory."""


class ChangedInputsError(RecipeError, CheckpointError):
    """What a run reads is not what its checkpoints were trained with: data, rewards, model files or a table of V*."""


class GuardError(StrettoError):
    """A guard of the recipe stopped the run."""


class ExportError(StrettoError):
    """What was made of a run's model (merged, written as GGUF) is not proved to be it."""
