"""A mixture is trained on the experts that sampled: what engines note, what trainers follow, what for."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig

from alone import drained
from crewed import distance, together
from families import FAMILIES, SIZES, sharpen
from running import RECIPE, metrics, recipe_in, resume, start
from stretto.algorithms.base import build
from stretto.algorithms.kl import k3
from stretto.api.replay import replay
from stretto.engines.base import Request, earlier_first
from stretto.engines.native import decode_backend
from stretto.engines.native.engine import NativeEngine
from stretto.errors import RecipeError
from stretto.models.attention import TreeLayout
from stretto.models.expert_choices import follow_choices, is_router, noting
from stretto.models.scratch import character_tokenizer
from stretto.recipe.schema import AlgorithmSection
from stretto.training.packing import merge
from stretto.training.trainer import Trainer
from stretto.types import ANY_EXPERT, Conversation, Sample
from tiny import SETTINGS, VOCABULARY, Recorder, policy_from, step

MIXTURES = {name: FAMILIES[name] for name in ("qwen3 with experts", "deepseek v3 with narrow values")} | {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
ALGORITHM = build(AlgorithmSection())


def mixture(family, dtype=torch.float64):
    policy = policy_from(MIXTURES[family](), dtype=dtype)
    sharpen(policy.network)
    return replace(policy, routing=follow_choices(policy.network))


def sampled(policy, *, groups=4, samples=3, new=12, engine=None):
    """Conversations as an engine samples them, groups of which share their contexts."""
    rng = np.random.default_rng(4)
    contexts = [rng.integers(1, VOCABULARY, size=int(rng.integers(3, 40))) for _ in range(groups)]
    requests = [
        Request(key=1000 * g + a, tokens=context, max_new_tokens=new, stop=frozenset({0}), temperature=1.0)
        for g, context in enumerate(contexts)
        for a in range(samples)
    ]
    engine = engine or NativeEngine(policy, slots=5)
    engine.submit(requests)
    done = drained(engine)
    return [talk_of(request, done[request.key]) for request in requests]


def talk_of(request, completion):
    before, count = len(request.tokens), len(completion.tokens)
    return Conversation(
        tokens=np.concatenate([request.tokens, completion.tokens]),
        trained=np.arange(before + count) >= before,
        logprobs=np.concatenate([np.zeros(before), completion.logprobs]),
        stop=completion.stop,
        version=completion.version,
        experts=completion.experts,
    )


def otherwise(talk):
    """As if all others had computed it."""
    return replace(talk, experts=np.where(talk.experts == ANY_EXPERT, ANY_EXPERT, 3 - talk.experts))


def samples_of(talks):
    return [
        Sample(
            key=("p", 0, index, 0),
            conversation=talk,
            advantage=np.full(int(talk.trained.sum()), (-1.0) ** index * (1 + index)),
            leads=True,
        )
        for index, talk in enumerate(talks)
    ]


@torch.no_grad()
def chosen_alone(policy, tokens):
    """What the routers choose for a conversation by itself."""
    tree = merge([tokens])
    with noting(policy.routing) as choices:
        policy.hidden(
            torch.as_tensor(tokens), torch.arange(len(tokens)), TreeLayout.of(tree.segments, torch.device("cpu"))
        )
        return choices.taken()


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("speculate", [True, False])
def test_an_engine_notes_the_experts_of_every_token_it_has_read(family, speculate):
    policy = mixture(family)
    routers = sum(map(is_router, policy.network.modules()))
    for talk in sampled(policy, engine=NativeEngine(policy, slots=5, speculate=speculate)):
        assert talk.experts.shape == (len(talk.tokens), routers, 2) and talk.experts.dtype == np.int16
        assert (talk.experts[-1] == ANY_EXPERT).all(), "nobody reads the last token"
        alone = chosen_alone(policy, talk.tokens[:-1])
        np.testing.assert_array_equal(np.sort(talk.experts[:-1]), np.sort(alone))


def test_an_answer_that_is_taken_out_says_what_it_has_read():
    policy = mixture("mixtral")
    engine = NativeEngine(policy)
    request = Request(key=7, tokens=np.arange(17) % VOCABULARY, max_new_tokens=30, stop=frozenset(), temperature=1.0)
    waits = replace(request, key=8)
    engine.submit([request])
    engine.step(0.0)
    engine.step(0.0)
    engine.submit([waits])
    partial = {each.key: each for each in engine.abort([7, 8])}
    assert partial[8].experts is None
    talk = talk_of(request, partial[7])
    assert len(talk.experts) == len(talk.tokens) > len(request.tokens)
    np.testing.assert_array_equal(np.sort(talk.experts[:-1]), np.sort(chosen_alone(policy, talk.tokens[:-1])))


def test_what_was_chosen_when_a_token_was_sampled_stays():
    first = np.array([[[1]], [[2]], [[ANY_EXPERT]]], dtype=np.int16)
    then = np.array([[[5]], [[6]], [[7]], [[ANY_EXPERT]]], dtype=np.int16)
    assert earlier_first(first, then)[:, 0, 0].tolist() == [1, 2, 7, ANY_EXPERT]
    assert earlier_first(None, then) is None and earlier_first(first, None) is None


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_that_the_trainer_would_choose_anyway_change_no_gradient(family, checkpointing):
    policy = mixture(family)
    talks = sampled(policy)
    told = step(policy, ALGORITHM, samples_of(talks), checkpointing=checkpointing)
    free = step(policy, ALGORITHM, samples_of([replace(each, experts=None) for each in talks]))
    assert told.metrics["loss"] == pytest.approx(free.metrics["loss"], rel=1e-10)
    for name, gradient in free.gradients.items():
        torch.testing.assert_close(told.gradients[name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", MIXTURES)
def test_others_are_followed_and_any_row_has_the_same_gradient(family):
    """Every expert is another one, of the first conversation all but its first token: rows of one and of many, and a
    shared prompt, all follow."""
    policy = mixture(family)
    talks = [
        replace(talk, experts=np.where(talk.experts == ANY_EXPERT, ANY_EXPERT, 3 - talk.experts))
        for talk in sampled(policy)
    ]
    seen = []
    experts = [module.experts for module in policy.network.modules() if hasattr(module, "experts")]
    hooks = [each.register_forward_pre_hook(lambda module, given: seen.append(given[1])) for each in experts]
    together_ = step(policy, ALGORITHM, samples_of(talks))
    for hook in hooks:
        hook.remove()
    tree = merge([talk.tokens for talk in talks])
    (table,) = {router.shape[0] for router in seen}
    assert table >= len(tree.tokens)
    for router, chosen in enumerate(seen):
        for talk, places in zip(talks, tree.places, strict=True):
            np.testing.assert_array_equal(chosen[places[:-1]].numpy(), talk.experts[:-1, router])
    apart = step(policy, ALGORITHM, *[[sample] for sample in samples_of(talks)])
    free = step(policy, ALGORITHM, samples_of([replace(each, experts=None) for each in talks]))
    for name, gradient in together_.gradients.items():
        torch.testing.assert_close(apart.gradients[name], gradient, rtol=1e-4, atol=1e-6)  # norms compute in fp32
    assert any(not torch.allclose(free.gradients[name], g) for name, g in together_.gradients.items())


def test_only_the_policy_follows(family="mixtral"):
    policy, other = mixture(family), mixture(family)
    trainer = Trainer(policy, ALGORITHM, Recorder(), **SETTINGS)
    talks = sampled(policy)
    wrong = [
        replace(talk, experts=np.where(talk.experts == ANY_EXPERT, ANY_EXPERT, 3 - talk.experts)) for talk in talks
    ]
    free = np.concatenate(trainer.score(talks))
    assert not np.allclose(np.concatenate(trainer.score(wrong)), free)
    np.testing.assert_allclose(np.concatenate(trainer.score(wrong, reference=other)), free, rtol=0, atol=1e-9)
    trainer.close()


def gap(policy, talks):
    """Mean k3 between the engine's and the trainer's log-probabilities."""
    trainer = Trainer(policy, ALGORITHM, Recorder(), **SETTINGS)
    scores = torch.as_tensor(np.concatenate(trainer.score(talks)))
    trainer.close()
    engine = torch.as_tensor(np.concatenate([talk.logprobs[talk.trained] for talk in talks]))
    return float(k3(engine, scores).mean())


def test_in_bf16_engine_and_trainer_agree_better(monkeypatch, family="qwen3 with experts"):
    """With an engine that rounds at other places: with kernels of one kind, both round alike as it is."""
    monkeypatch.setattr(decode_backend, "decode_kernels", lambda dtype: None)
    policy = mixture(family, torch.bfloat16)
    talks = sampled(policy, groups=16, samples=4, new=24, engine=NativeEngine(policy))
    followed, free = gap(policy, talks), gap(policy, [replace(talk, experts=None) for talk in talks])
    print(f"mean k3 {free:.2e} -> {followed:.2e}")
    assert followed < 0.5 * free


# Runs -----------------------------------------------------------------------------------------------------------------


def saved_in(folder, config):
    """The model section of a mixture that has the tokenizer of the tiny recipe."""
    tokenizer = character_tokenizer(RECIPE["model"]["scratch"]["characters"])
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"name": str(folder), "scratch": None, "dtype": "float32", "adapter": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny mixture as a model to train."""
    return saved_in(tmp_path_factory.mktemp("mixture"), FAMILIES["qwen3 with experts"]())


def test_a_run_that_follows_is_the_same_on_one_device_and_on_two(saved, tmp_path):
    recipe = recipe_in(tmp_path, model=saved, engine__router_replay=True)
    single, reports, _ = asyncio.run(together(recipe, tmp_path, "flatten", devices=1))
    for strategy in ("flatten", "separate", "elastic"):
        weights, found, _ = asyncio.run(together(recipe, tmp_path, strategy))
        assert distance(single, weights) < 1e-2 * recipe.optimizer.lr  # fp32, and Adam makes much of rounding
        assert all(each["kl/engine_trainer"] < 1e-9 for each in (*reports, *found))


def test_a_run_with_an_adapter_follows_and_its_resume_is_the_same_run(saved, tmp_path):
    changes = {"model": saved | {"adapter": {"rank": 2}}, "engine__router_replay": True, "algorithm__kl": {"coef": 0.1}}
    whole = start(tmp_path, **changes, run__steps=2).folder
    short = start(tmp_path, **changes, run__steps=1).folder
    resume(short, changes=["run.steps=2"], allow=["run.steps"])
    assert [row["loss"] for row in metrics(short)[1:]] == [row["loss"] for row in metrics(whole)[1:]]
    assert metrics(whole)[-1]["kl/engine_trainer"] < 1e-9
    with pytest.raises(RecipeError, match="replay of a run that is trained on its engine's choice"):
        replay(whole, step=1)


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no experts to choose among"):
        start(tmp_path, engine__router_replay=True, run__steps=1)


@pytest.mark.filterwarnings("ignore:gpt_oss")
def test_a_mixture_that_keeps_its_own_attention_is_refused(tmp_path):
    config = GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(RecipeError, match="needs packed rows"):
        start(tmp_path, model=saved_in(tmp_path / "model", config), engine__router_replay=True, run__steps=1)
