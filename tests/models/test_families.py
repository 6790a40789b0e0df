"""Random tiny models of several families: a packed tree gives what transformers gives for each conversation alone.

Stock norms cast to fp32 whatever the model computes in, so gradients agree to its rounding; with norms that keep the
model's type they agree to 1e-10, which shows that nothing else is lost.
"""

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)

from families import FAMILIES, SIZES, keep_double
from rounding import rounding
from stretto.algorithms.base import build
from stretto.errors import RecipeError
from stretto.kernels.cpu import tiles
from stretto.models.load import refuse_unknown_attention
from stretto.recipe.schema import AlgorithmSection
from tiny import VOCABULARY, credited, distance, naive_step, policy_from, random_groups, step


@pytest.fixture(params=[0, tiles.PER_CALL], autouse=True, ids=["siblings apart", "as it pays"])
def pieces(request, monkeypatch):
    """Whether siblings are computed side by side wherever they can be, or only where that is faster."""
    monkeypatch.setattr(tiles, "PER_CALL", request.param)


def both(policy):
    algorithm = build(AlgorithmSection(name="rloo"))
    samples = credited(algorithm, random_groups(2))
    loss, expected = naive_step(policy, algorithm, samples, temperature=0.9)
    packed = step(policy, algorithm, samples, temperature=0.9, token_budget=300)
    assert packed.metrics["tokens/shared"] > 50
    return loss, expected, packed


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_what_transformers_computes_one_by_one(family):
    policy = policy_from(FAMILIES[family]())
    loss, expected, packed = both(policy)
    norms = 2 * policy.network.config.num_hidden_layers + 1
    # Each rounds what comes in, what it is divided by and what goes out, on the way there and back.
    close = rounding(torch.float32, *[1, 1, 1] * norms * 2)
    assert packed.metrics["loss"] == pytest.approx(loss, rel=close)
    assert distance(expected, packed.gradients) < close


@pytest.mark.parametrize("family", FAMILIES)
def test_with_norms_in_double_precision_they_agree_to_ten_digits(family):
    policy = policy_from(FAMILIES[family]())
    keep_double(policy.network)
    loss, expected, packed = both(policy)
    assert packed.metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert distance(expected, packed.gradients) < 1e-10


def test_a_window_is_seen_by_the_tests_above():
    """Without it the same weights give another loss, so a window that were ignored would not pass."""
    narrow, wide = policy_from(MistralConfig(**SIZES, sliding_window=8)), policy_from(MistralConfig(**SIZES))
    wide.network.load_state_dict(narrow.network.state_dict())
    assert abs(both(narrow)[0] - both(wide)[0]) > 1e-5


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
        (
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 128,
                },
            ),
            "longrope",
        ),
        (
            Gemma3TextConfig(
                **SIZES,
                layer_types=["sliding_attention", "full_attention"],
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                },
            ),
            "dynamic",
        ),
        (Qwen3Config(**SIZES, layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
    ],
)
def test_a_model_that_packed_rows_would_compute_wrongly_is_refused(config, reason):
    with pytest.raises(RecipeError, match=reason) as caught:
        refuse_unknown_attention(config)
    assert caught.value.problems[0].field == "model.name"


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_rope_that_depends_on_positions_alone_is_accepted_and_exact(rope):
    numbers = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    policy = policy_from(LlamaConfig(**SIZES, rope_parameters=numbers))
    keep_double(policy.network)
    _, expected, packed = both(policy)
    assert distance(expected, packed.gradients) < 1e-10


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GraniteConfig(**SIZES, logits_scaling=4.0), "other numbers than its own forward"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_family_that_would_be_trained_wrongly_without_a_word_is_found_out_when_it_is_loaded(config, reason, dtype):
    with pytest.raises(RecipeError, match=reason):
        policy_from(config, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_not_taken_for_a_wrong_family(family):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        policy_from(FAMILIES[family](), dtype=dtype)


def test_dropout_is_switched_off_because_engine_and_trainer_must_agree():
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=1,
        n_head=4,
        resid_pdrop=0.3,
        embd_pdrop=0.2,
        attn_pdrop=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    loss, _, packed = both(policy_from(config))
    assert packed.metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert policy_from(config).network.training


def test_dropout_that_modules_took_from_the_configuration_is_off_too():
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=256,
        dropout=0.5,
        attention_dropout=0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    loss, expected, packed = both(policy_from(config))
    assert packed.metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert distance(expected, packed.gradients) < 1e-10
