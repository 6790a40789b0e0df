"""Asks a built-in scorer about an answer, and decides whose fault it is if the scorer never comes to an end.

An answer that keeps a built-in scorer busy beyond its processor time, fills its memory or kills its process would do
so again on every try and in every resumed run: samples are keyed. So it is a wrong answer, counted as `Costly`. But
only if the scorer can judge the task's own answer within the same limits; where it cannot, the failure is ours, and
there is no verdict. A machine that is too busy to give a worker its processor time is no answer's fault either.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import SandboxDeadlineError, SandboxDiedError, SandboxError, SandboxLimitError, VerdictError
from stretto.rewards.base import Costly
from stretto.sandbox.pool import Builtin, Limits, Pool

MEMORY_GB = 2.0
"""Memory for one verdict; reasoning-gym and sympy need a small part of it."""
SHARED, PATIENCE = 4.0, 10.0
"""By the clock a verdict may take so many times its processor time, and so many seconds on top: other programs use the
processors, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A function of stretto's that judges an answer, in a worker process with limits."""

    pool: Pool
    """Where it runs."""
    target: str
    """`module:name`; it gets the answer first and returns a number, or a number and whether the answer was costly."""
    seconds: float
    """Processor time for one verdict."""

    async def score(self, answer: str, own: str, *rest: object, prepare: tuple[object, ...] | None = None) -> float:
        """The verdict on `answer`; `own` is an answer that the scorer has to be able to judge."""
        builtin = Builtin(prepare=prepare)
        try:
            return await self._tried(answer, *rest, builtin=builtin)
        except SandboxDiedError as error:
            reason = error
        try:
            await self._ask(own, *rest, builtin=builtin)
        except SandboxError as error:
            raise VerdictError(f"{reason}; nor could the task's own answer be judged: {error}") from error
        return Costly(0.0)

    async def _tried(self, answer: str, *rest: object, builtin: Builtin) -> float:
        """One try, and another only where the process died for a reason that may not be the answer."""
        try:
            return await self._ask(answer, *rest, builtin=builtin)
        except SandboxLimitError:
            raise
        except (SandboxDiedError, SandboxDeadlineError):
            return await self._ask(answer, *rest, builtin=builtin)

    async def _ask(self, answer: str, *rest: object, builtin: Builtin) -> float:
        found = await self.pool.call(
            self.target,
            answer,
            *rest,
            deadline=SHARED * self.seconds + PATIENCE,
            limits=Limits(memory_gb=MEMORY_GB, cpu_seconds=self.seconds),
            builtin=builtin,
        )
        score, costly = found if isinstance(found, list) else (found, False)
        return Costly(score) if costly else float(score)
