"""The warm-up imitates reference answers, so that there is something to reinforce."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from running import END, ONE, recipe_in, tensors
from stretto.engines.native.engine import NativeEngine
from stretto.environments import resolve, single_turn
from stretto.environments.render import Renderer
from stretto.errors import RecipeError
from stretto.models.load import load
from stretto.models.scratch import character_tokenizer
from stretto.models.source import ModelFiles
from stretto.recipe.schema import NumberGame, Scratch
from stretto.runtime.build import build_runtime, environment_of
from stretto.runtime.demonstrations import demonstrations, player_of
from stretto.runtime.plans import make_plan
from stretto.runtime.warmup import PROMPTS, demonstration, shuffled, warm_up
from stretto.tasks.source import PromptSource, load_prompts
from stretto.types import Prompt

FILES = ModelFiles(kind="scratch", name="scratch", folder=None, file=None)


def fresh(recipe):
    return load(recipe.model, FILES, seed=recipe.seed, device=torch.device("cpu"))


def warmed(recipe, root):
    """A policy after its warm-up, and what was noted."""
    policy, notes = fresh(recipe), []
    prompts = load_prompts(recipe.task, root)
    environment = environment_of(recipe, root)
    warm_up(policy, recipe.model.scratch, prompts=prompts, environment=environment, seed=recipe.seed, note=notes.append)
    return policy, notes


def test_a_demonstration_trains_the_answer_and_the_end_of_the_turn():
    renderer = Renderer(character_tokenizer("01="), stop=frozenset({END}))
    prompt = Prompt(id="p", messages=({"role": "user", "content": "11="},), reference="11")
    sample = demonstration(prompt, 3, renderer, longest=32)
    tokens = sample.conversation.tokens
    assert tokens[sample.conversation.trained].tolist() == [ONE, ONE, END]
    assert tokens[~sample.conversation.trained].tolist() == renderer.open(prompt.messages).tolist()
    assert (sample.key, sample.leads, sample.advantage.tolist()) == (("p", 3, 0, 0), True, [1.0] * 3)


def test_the_loss_falls_and_nothing_of_the_trainer_stays_behind(tmp_path):
    recipe = recipe_in(tmp_path, model__scratch__warmup_steps=40, model__scratch__warmup_lr=0.02)
    policy, notes = warmed(recipe, tmp_path)
    losses = [float(note.rpartition(" ")[2]) for note in notes]
    assert [note.split(",")[0] for note in notes] == ["warm-up 20/40", "warm-up 40/40"]
    assert losses[-1] < losses[0] < np.log(8)
    assert not any(weight.grad is not None for weight in policy.trained().values())
    assert not any(weight._post_accumulate_grad_hooks for weight in policy.trained().values())


def test_it_is_the_same_every_time_and_none_at_all_changes_nothing(tmp_path):
    recipe = recipe_in(tmp_path, model__scratch__warmup_steps=3)
    one, other = (warmed(recipe, tmp_path)[0].network.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    none, notes = warmed(recipe_in(tmp_path, model__scratch__warmup_steps=0), tmp_path)
    untouched = fresh(recipe).network.state_dict()
    assert notes == []
    assert all(torch.equal(none.network.state_dict()[name], untouched[name]) for name in untouched)
    assert not torch.equal(one["model.embed_tokens.weight"], untouched["model.embed_tokens.weight"])


def test_prompts_without_an_answer_cannot_be_imitated(tmp_path):
    recipe = recipe_in(tmp_path)
    prompts = [Prompt(id="p", messages=({"role": "user", "content": "1"},))]
    with pytest.raises(RecipeError, match="imitates reference answers"):
        warm_up(fresh(recipe), recipe.model.scratch, prompts=prompts, environment=single_turn.run, seed=0, note=print)
    without = recipe.model.scratch.model_copy(update={"warmup_steps": 0})
    warm_up(fresh(recipe), without, prompts=prompts, environment=single_turn.run, seed=0, note=print)


def test_the_warmed_base_is_made_once_and_never_half(tmp_path):
    recipe = recipe_in(tmp_path, model__adapter={"kind": "lora", "rank": 2, "alpha": 4.0})
    notes = []

    def assembled():
        async def run():
            policies, made = [], {"plan": make_plan(recipe), "root": tmp_path, "folder": tmp_path}
            engine = lambda policy: policies.append(policy) or NativeEngine(policy)  # noqa: E731
            parts = await build_runtime(recipe, **made, note=notes.append, make_engine=engine)
            await parts.close()
            return parts.base, *policies

        return asyncio.run(run())

    (tmp_path / ".base.draft").mkdir()
    (tmp_path / ".base.draft" / "model.safetensors").write_text("torn")
    base, first = assembled()
    assert len(notes) == 1
    assert base == Path(tmp_path / "base")
    _, second = assembled()
    assert len(notes) == 1, "the base was warmed up again"
    assert not (tmp_path / ".base.draft").exists()
    held = tensors(tmp_path / "base")
    for policy in (first, second):
        state = {name.replace("base_layer.", ""): tensor for name, tensor in policy.network.state_dict().items()}
        assert all(torch.equal(state[name], tensor) for (_, name), tensor in held.items())


def test_an_answer_beyond_the_context_is_never_computed():
    prompt = Prompt(id="p", messages=({"role": "user", "content": "1="},), reference="1" * 40)
    renderer = Renderer(character_tokenizer("01="), stop=frozenset({END}))
    with pytest.raises(RecipeError, match="prompt p with its own has 45 tokens, more than the context of 32"):
        demonstration(prompt, 0, renderer, longest=32)


def test_what_is_imitated_is_what_a_good_player_says_in_the_environment():
    section = NumberGame(range=(0, 3), turns=3, higher=">", lower="<", right="=", invalid="?")
    renderer = Renderer(character_tokenizer("0123<>=?"), stop=frozenset({END}))
    game = resolve(section)
    prompts = [Prompt(id=n, messages=({"role": "user", "content": "?"},), reference=n) for n in "03"]
    source = PromptSource(prompts, seed=0)
    shown = demonstrations(source, game, player_of(game, ()), renderer, context=32, prompts=3)
    assert [sample.key for sample in shown] == [("3", 0, 0, 0), ("0", 0, 0, 0), ("3", 1, 0, 0)]
    texts = {sample.key[0]: renderer.all_text(sample.conversation.tokens.tolist()) for sample in shown}
    assert texts["0"] == "<|user|>?<|assistant|>1<|end|><|user|><<|assistant|>0<|end|>"
    assert texts["3"].endswith("1<|end|><|user|>><|assistant|>2<|end|><|user|>><|assistant|>3<|end|>")
    trained = shown[0].conversation
    assert renderer.all_text(trained.tokens[trained.trained].tolist()) == "1<|end|>2<|end|>3<|end|>"


def test_the_conversations_of_a_prompt_come_in_different_steps():
    alone = [(prompt, 0) for prompt in range(PROMPTS)]
    many = [(prompt, talk) for prompt in range(PROMPTS) for talk in range(3)]
    assert shuffled(alone, seed=[0, 0]) is alone
    dealt = shuffled(many, seed=[0, 0])
    assert dealt == shuffled(many, seed=[0, 0]) != shuffled(many, seed=[0, 3])
    assert sorted(dealt) == sorted(many)
    assert len({prompt for prompt, _ in dealt[:PROMPTS]}) > PROMPTS / 2


def test_templates_of_the_recipe_say_what_is_imitated_turn_by_turn():
    ways = Scratch(demonstration=("call({a})", "{answer}")).ways
    player = player_of(single_turn.run, ways)
    prompt = Prompt(id="p", messages=(), reference="7", tags={"a": 3})
    assert [player(prompt, turn, ()) for turn in range(3)] == ["call(3)", "7", "7"]
    several = player_of(single_turn.run, Scratch(demonstration=(*ways, ("{a}",))).ways)
    shown = {several(replace(prompt, id=str(number)), 0, ()) for number in range(20)}
    assert shown == {"call(3)", "3"}
    assert several(prompt, 0, ()) == several(prompt, 0, ())
    with pytest.raises(RecipeError, match="cannot be filled in for prompt p"):
        player_of(single_turn.run, (("{b}",),))(prompt, 0, ())


@pytest.mark.parametrize(
    ("context", "reference", "says"), [(6, "3", "more tokens than the context"), (32, "x", "no secret")]
)
def test_a_prompt_that_cannot_be_played_is_refused_by_name(context, reference, says):
    game = resolve(NumberGame(range=(0, 3), turns=3, higher=">", lower="<"))
    renderer = Renderer(character_tokenizer("0123<>=?"), stop=frozenset({END}))
    source = PromptSource([Prompt(id="p", messages=({"role": "user", "content": "?"},), reference=reference)], seed=0)
    with pytest.raises(RecipeError, match=f"prompt p.*{says}"):
        demonstrations(source, game, player_of(game, ()), renderer, context=context, prompts=1)
