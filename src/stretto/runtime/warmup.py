"""The supervised start of a scratch model: a little imitation, so that reinforcement has something to reinforce.

It is the same trainer with another term: the negative log-likelihood of the reference answers to training prompts, or
of whole conversations where there is somebody to show them (`demonstrations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stretto.algorithms.sft import imitation
from stretto.environments.base import Environment
from stretto.environments.render import Renderer
from stretto.errors import RecipeError
from stretto.models.load import Policy
from stretto.recipe.schema import Optimizer, Scratch
from stretto.runtime.demonstrations import demonstrations, player_of
from stretto.runtime.interrupt import stop_if_interrupted
from stretto.tasks.source import PromptSource
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer
from stretto.types import Conversation, Prompt, Sample

PROMPTS = 64
"""Reference answers, or conversations, per supervised step."""

BUDGET = 8192
"""Tokens per row; a scratch model is tiny."""


def warm_up(
    policy: Policy,
    section: Scratch,
    *,
    prompts: Sequence[Prompt],
    environment: Environment,
    seed: int,
    note: Callable[[str], None],
) -> None:
    """Trains on demonstrations for `warmup_steps` steps."""
    player = player_of(environment, section.ways)
    if player is None and any(prompt.reference is None for prompt in prompts) and section.warmup_steps:
        raise RecipeError.of(
            "model.scratch.warmup_steps",
            "the warm-up imitates reference answers, and this task has prompts without one",
            "set warmup_steps: 0 or add the answers",
        )
    renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens)
    source = PromptSource(prompts, seed=seed)
    settings = Optimizer(lr=section.warmup_lr, warmup=min(20, section.warmup_steps), schedule="cosine")
    optimizer = MasterAdamW(policy.trained(), settings, updates=section.warmup_steps)
    trainer = Trainer(
        policy, imitation(), optimizer, token_budget=BUDGET, temperature=1.0, clip=1.0, checkpointing="auto"
    )
    waiting: list[Sample] = []
    for step in range(section.warmup_steps):
        stop_if_interrupted()
        if player is None:
            drawn = source.take(PROMPTS)
            shown = [demonstration(prompt, visit, renderer, longest=section.context) for prompt, visit in drawn]
        else:
            while len(waiting) < PROMPTS:
                play = demonstrations(source, environment, player, renderer, context=section.context, prompts=PROMPTS)
                waiting += shuffled(play, seed=[seed, step])
            shown, waiting = waiting[:PROMPTS], waiting[PROMPTS:]
        trainer.accumulate(shown)
        loss = trainer.apply().metrics["loss"]
        if step % 20 == 19 or step + 1 == section.warmup_steps:
            note(f"warm-up {step + 1}/{section.warmup_steps}, loss {loss:.3f}")
    trainer.close()


def shuffled(samples: list[Sample], *, seed: list[int]) -> list[Sample]:
    """Those of one prompt are much alike, so where they are many they come in different steps."""
    if len(samples) <= PROMPTS:
        return samples
    return [samples[place] for place in np.random.default_rng(seed).permutation(len(samples))]


def demonstration(prompt: Prompt, visit: int, renderer: Renderer, *, longest: int) -> Sample:
    """A prompt with its reference answer as the thing to imitate; `longest` is the model's context."""
    asked = renderer.open(prompt.messages)
    answer = renderer.answer(prompt.messages, prompt.reference or "")
    tokens = np.concatenate([asked, answer])
    if len(tokens) > longest:  # attention takes the square of it
        raise RecipeError.of(
            "model.scratch.warmup_steps",
            f"the warm-up imitates reference answers, and prompt {prompt.id} with its own has {len(tokens)} tokens, "
            f"more than the context of {longest}",
            "shorten or drop it, raise model.scratch.context, or set warmup_steps: 0",
        )
    trained = np.arange(len(tokens)) >= len(asked)
    conversation = Conversation(tokens=tokens, trained=trained, logprobs=np.zeros(len(tokens)), stop="stop", version=0)
    return Sample(key=(prompt.id, visit, 0, 0), conversation=conversation, advantage=np.ones(len(answer)), leads=True)
