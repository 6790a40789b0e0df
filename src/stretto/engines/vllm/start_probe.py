"""Whether an engine that has just started computes what the trainer computes, with the weights that both have.

Equal weights are no proof of that: an engine has code of its own for every family and processor. vLLM 0.32 turns
DeepSeek's positions otherwise on a CPU, for example, and says nothing.
"""

from __future__ import annotations

import time

import numpy as np

from stretto.engines.base import Request
from stretto.engines.served.probe import ALLOWED, MOST, ProbeAnswer, own_logprobs, probe_tokens
from stretto.engines.vllm.engine import VllmEngine
from stretto.engines.vllm.engine_args import NATIVE
from stretto.errors import DeadlineError, RecipeError


def refuse_other_results(engine: VllmEngine) -> None:
    """Raises unless the engine says of an answer of its own what the trainer says of it, but for rounding: over so many
    tokens that one for which other experts were chosen is not what decides."""
    policy, most = engine.policy, min(MOST, engine.settings.context // 2 - 1)
    context = (probe_tokens(policy) or list(range(len(policy.tokenizer))))[:most]
    probe = Request(key=0, tokens=np.array(context), max_new_tokens=most, stop=frozenset(), temperature=1.0)
    engine.submit([probe])
    patience = engine.patience.first
    end = time.monotonic() + patience
    while not (done := engine.step(1.0)):
        if time.monotonic() > end:
            why = f"vLLM has not written {most} tokens within {patience:.0f} s"
            raise DeadlineError(f"{why}\n    fix: raise deadlines.start")
    (said,) = done
    trained = own_logprobs(policy, [*context, *said.tokens.tolist()])[-most:]
    answer = ProbeAnswer(name=engine.called, engine=said.logprobs, trainer=trained)
    if not answer.apart <= ALLOWED[policy.dtype]:
        kind = policy.network.config.model_type
        reason = f"vLLM computes {kind} otherwise than the trainer, with equal weights: they are {answer.sentence}"
        raise RecipeError.of("engine.kind", reason, NATIVE)
