"""A teacher that is asked something else than the policy: the prompt with an answer to copy from, an example, advice.

The policy's answer stands behind the teacher's prompt as it was sampled, token by token, so a teacher says of the very
same tokens how likely they are to whoever knows more. That lets a model teach itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from stretto.environments.render import Renderer
from stretto.errors import TrainingError
from stretto.models.source import facts, locate
from stretto.recipe.schema import Recipe
from stretto.tasks.template import TEACHERS, reworded
from stretto.types import Conversation, Prompt, Trajectory, trajectory_key

Key = tuple[str, int, int, int]
"""Trajectory and index of a conversation, as `Sample.key`."""


def shared_context(recipe: Recipe, root: Path, context: int) -> int:
    """The longest conversation that both the policy, which has this context, and its teacher were made for."""
    teacher = recipe.roles.teacher
    if teacher is None or teacher.name in (None, "scratch"):
        return context
    its = facts(locate(teacher.name, root))
    return context if its is None or its.context is None else min(context, its.context)


def teacher_prompt(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, stop: frozenset[int], context: int
) -> TeacherPrompt | None:
    """What the recipe's teacher is asked, where that is something else than the policy is."""
    teacher = recipe.roles.teacher
    if teacher is None or teacher.prompt is None:
        return None
    renderer = Renderer(tokenizer, stop=stop, arguments=recipe.task.template)
    return TeacherPrompt(teacher.prompt, renderer, context=context)


class TeacherPrompt:
    """What a teacher is asked."""

    def __init__(self, template: str, renderer: Renderer, *, context: int) -> None:
        """`context` is the longest conversation that both models were made for."""
        self.template, self.renderer, self.context = template, renderer, context

    def asked_all(
        self, trajectories: Sequence[Trajectory], keyed: Sequence[tuple[Key, Conversation]]
    ) -> list[tuple[Key, Conversation]]:
        """The conversations of some trajectories, under their keys, as the teacher sees them."""
        prompts = {trajectory_key(trajectory): trajectory.prompt for trajectory in trajectories}
        return [(key, self.asked(prompts[key[:3]], conversation)) for key, conversation in keyed]

    def asked(self, prompt: Prompt, conversation: Conversation) -> Conversation:
        """A conversation that began with a prompt, as if it had begun with the teacher's."""
        if not conversation.trained.any():
            return conversation
        begun = int(np.argmax(conversation.trained))
        opening = self.renderer.open(reworded(prompt, self.template))
        if (length := len(opening) + len(conversation.tokens) - begun) > self.context:
            told = f"prompt {prompt.id} and its answer have {length} tokens with it, and the context has {self.context}"
            raise TrainingError(
                f"{TEACHERS}: {told}\n    fix: shorten the template, or leave such prompts out of the task"
            )
        nothing = np.zeros(len(opening))
        return replace(
            conversation,
            tokens=np.concatenate([opening, conversation.tokens[begun:]]),
            trained=np.concatenate([nothing.astype(bool), conversation.trained[begun:]]),
            logprobs=np.concatenate([nothing, conversation.logprobs[begun:]]),
            parent=None,
            experts=None,  # they are the policy's, and of other tokens
        )
