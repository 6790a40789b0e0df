"""Models that cannot be given packed rows: conversations one by one, the same gradient, and a word about it once."""

import warnings

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen3NextConfig,
    StableLmConfig,
)

from families import SIZES, InDouble
from rounding import backward_sums, longest, rounding
from stretto.algorithms.base import build
from stretto.errors import RecipeError
from stretto.models.attention import TreeLayout
from stretto.models.unpacked import continued, states_apart
from stretto.recipe.schema import AlgorithmSection
from stretto.training.packing import merge
from stretto.training.rows import halved
from tiers import slow_but
from tiny import VOCABULARY, credited, distance, naive_step, policy_from, random_groups, step

FAMILIES = {
    "capped scores": lambda: Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=0.5, sliding_window=8),
    "alibi": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=0, pad_token_id=0
    ),
    "an attention of its own": lambda: StableLmConfig(**SIZES),
    "attention sinks": lambda: GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "linear attention": lambda: Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}


def apart(family, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return policy_from(FAMILIES[family](), **keywords)


def both(family, **settings):
    """Loss and gradient of plain transformers, and the trainer's step."""
    policy = apart(family)
    algorithm = build(AlgorithmSection(name="rloo"))
    samples = credited(algorithm, random_groups(2))
    loss, expected = naive_step(policy, algorithm, samples, temperature=0.9)
    packed = step(policy, algorithm, samples, temperature=0.9, **settings)
    assert policy.apart
    assert packed.metrics["tokens/shared"] == 0
    return loss, expected, packed, rounding(torch.float32, *rounded_sums(policy.network.config, longest(samples)))


def rounded_sums(config, tokens):
    """Layers cast to fp32 here and there; a delta rule solves for the tokens of a chunk one after the other."""
    chunk = 64
    delta = [chunk] * chunk * getattr(config, "layer_types", []).count("linear_attention")
    return backward_sums(config, tokens) + 2 * delta


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", slow_but({"token_budget": 60}, of=[{}, {"token_budget": 60}]), ids=str)
def test_the_gradient_is_that_of_each_conversation_alone(family, settings):
    with InDouble():
        loss, expected, packed, _ = both(family, **settings)
    assert packed.metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert distance(expected, packed.gradients) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_is_where_layers_cast_to_single_precision_and_are_recomputed(family):
    loss, expected, packed, close = both(family, checkpointing=True)
    assert packed.recomputes
    assert packed.metrics["loss"] == pytest.approx(loss, rel=close)
    assert distance(expected, packed.gradients) < close


def test_what_conversations_share_stands_in_the_row_once():
    policy, talks = apart("capped scores"), [torch.arange(30).numpy() % VOCABULARY for _ in range(2)]
    talks[1] = talks[1][::-1].copy()
    talks.append(talks[0].copy())
    talks[2][20:] += 1
    tree = merge(talks)
    assert len(tree.tokens) == 70
    layout = TreeLayout(segments=tree.segments)
    states = policy.hidden(torch.as_tensor(tree.tokens), torch.as_tensor(tree.positions), layout)
    for talk, place in zip(talks, tree.places, strict=True):
        alone = states_apart(policy.network, torch.as_tensor(talk), merge([talk]).segments)
        torch.testing.assert_close(states[place], alone)


def test_half_of_a_row_is_half_of_what_is_computed():
    samples = credited(build(AlgorithmSection(name="rloo")), random_groups(2))
    whole = sum(len(sample.conversation.tokens) for sample in samples)
    assert halved(samples, share=False)[1] == whole // 2 > halved(samples)[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_taken_for_a_wrong_family(family, dtype):
    assert apart(family, dtype=dtype).apart


def test_that_it_is_slower_is_said_once_with_the_reason():
    with pytest.warns(UserWarning, match=r"gemma2: it caps its attention scores .* one by one") as said:
        policy_from(FAMILIES["capped scores"]())
    assert len(said) == 1


def test_a_head_that_scales_its_logits_is_still_refused():
    with pytest.raises(RecipeError, match="other numbers than its own forward"):
        policy_from(GraniteConfig(**SIZES, logits_scaling=4.0))


def test_a_cache_that_gives_other_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(
        "stretto.models.unpacked.continued", lambda network, tokens, past=None: continued(network, tokens)
    )
    with pytest.raises(RecipeError, match="its cache gives other numbers"):
        policy_from(FAMILIES["capped scores"]())


def test_families_that_can_be_packed_are(recwarn):
    assert not policy_from(LlamaConfig(**SIZES)).apart
    assert not [warning for warning in recwarn if "one by one" in str(warning.message)]
