"""Attention over a tree of segments is attention over each conversation by itself, in values and in gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.algorithms.base import build
from stretto.errors import RecipeError
from stretto.kernels.cpu import tiled_attention as tiled
from stretto.kernels.cpu import tiles
from stretto.kernels.cpu.tiles import blocks_of, tiles_of
from stretto.models import attention
from stretto.models.attention import TreeLayout
from stretto.models.logprob_head import logprobs_of
from stretto.models.memory import recompute_activations
from stretto.recipe.schema import AlgorithmSection, Kl
from stretto.training import packing
from stretto.training.packing import divide, merge, pack
from tiny import CPU, credited, distance, random_groups, scratch_policy, step
from trees import trees

SIZE = 4
TIGHT = {torch.float64: {"rtol": 1e-12, "atol": 1e-13}, torch.float32: {"rtol": 1e-5, "atol": 2e-6}}
"""Kernels in C compute in float32, plain operations in float64."""


def plain(query, key, value, *, scale, window):
    """Softmax attention of one sequence with its formula: (H, L, D), (K, L, D), (K, L, D)."""
    length, repeats = query.shape[1], query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * (scale if scale is not None else SIZE**-0.5)
    row, column = torch.arange(length)[:, None], torch.arange(length)[None, :]
    hidden = (column > row) if window is None else (column > row) | (row - column >= window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


@settings(max_examples=60)
@given(
    sequences=trees(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    window=st.sampled_from([None, 1, 3, 10, 100]),
    scale=st.sampled_from([None, 0.3]),
    worth=st.sampled_from([1, 16]),
    together=st.sampled_from([1, 12, 256]),
    per_call=st.sampled_from([0, 40, 16_000]),
    most=st.sampled_from([60, 900, 32_000]),
    far=st.sampled_from([0, 4096]),
    keys=st.sampled_from([1, 100, 1 << 16]),
    dtype=st.sampled_from(list(TIGHT)),
)
def test_a_tree_gives_every_conversation_its_own_attention(
    sequences, heads, window, scale, worth, together, per_call, most, far, keys, dtype
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", worth)
        patch.setattr(attention, "BLOCK", together)
        patch.setattr(tiles, "PER_CALL", per_call)
        patch.setattr(tiles, "MOST_PAIRS", most)
        patch.setattr(tiles, "LEAST_ROWS", 2)
        patch.setattr(tiles, "FAR", far)
        patch.setattr(tiled, "KEYS_AT_ONCE", keys)
        tree = merge(sequences)
        layout = TreeLayout.of(tree.segments, CPU)
        generator = torch.Generator().manual_seed(len(tree.tokens))
        query, key, value = (
            torch.randn(1, count, len(tree.tokens), SIZE, generator=generator, dtype=dtype, requires_grad=True)
            for count in (heads[0], heads[1], heads[1])
        )
        packed = layout.attend(0, query, key, value, scale=scale, window=window)
    assert packed.shape == query.shape
    outgoing, loss, expected = [], 0.0, 0.0
    for places in map(torch.as_tensor, tree.places):
        alone = plain(query[0, :, places], key[0, :, places], value[0, :, places], scale=scale, window=window)
        torch.testing.assert_close(packed[0, :, places], alone, **TIGHT[dtype])
        outgoing = torch.randn(alone.shape, generator=generator, dtype=dtype)
        loss, expected = loss + (packed[0, :, places] * outgoing).sum(), expected + (alone * outgoing).sum()
    found = torch.autograd.grad(loss, (query, key, value))
    for one, other in zip(found, torch.autograd.grad(expected, (query, key, value)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT[dtype])


def shapes(found):
    """Of every tile: stretches, queries and keys of each, and how many of the queries are no pads."""
    return [(*tile.asked.shape, tile.known.shape[1], int((tile.asked >= 0).sum())) for tile in found]


def test_stretches_of_about_equal_length_are_computed_side_by_side():
    prompt = list(range(100, 120))
    answers = [[7] * length for length in (3, 30, 4, 28, 3)]
    tree = merge([np.array([*prompt, index, *answer]) for index, answer in enumerate(answers)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "PER_CALL", 200)
        apart = shapes(tiles_of(blocks_of(tree.segments)))
    # The prompt; answers of 4, 4 and 5 tokens; answers of 29 and 31: each with the token that tells them apart.
    assert apart == [(1, 20, 20, 20), (3, 5, 25, 13), (2, 31, 51, 60)]
    assert shapes(tiles_of(blocks_of(tree.segments)))[1:] == [(5, 31, 51, 73)], (
        "so few tokens are not worth calls of their own"
    )


def test_tiles_hold_stretches_of_any_groups_that_see_about_as_much():
    groups = [[np.array([group] * (40 + group) + [answer] * 20) for answer in range(50, 58)] for group in range(4)]
    tree = merge([row for group in groups for row in group])
    prompts, *answers = shapes(tiles_of(blocks_of(tree.segments)))
    assert prompts == (4, 43, 43, 166) and answers == [(25, 20, 63, 500), (7, 20, 63, 140)]
    far = merge([np.arange(30), np.concatenate([np.arange(100, 600), np.arange(30)])])
    assert len(tiles_of(blocks_of(far.segments))) > 1, "what sees much stands beside what sees as much"


def test_a_long_segment_is_cut_where_its_scores_would_outgrow_the_cache():
    tree = merge([np.arange(700), np.arange(700)[::-1].copy()])
    found = shapes(tiles_of(blocks_of(tree.segments)))
    assert max(count * queries * keys for count, queries, keys, _ in found) <= tiles.MOST_PAIRS < 700 * 700
    assert sum(asked for *_, asked in found) == 1400
    assert blocks_of(merge([np.arange(tiles.FAR + 1)]).segments) == ()


def test_a_model_called_without_a_layout_says_what_to_call_instead():
    with pytest.raises(ValueError, match=r"Policy\.hidden"):
        scratch_policy().network(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("extra", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}])
def test_what_this_attention_cannot_do_is_refused(extra):
    policy = scratch_policy()
    module, states = policy.network.get_decoder().layers[0].self_attn, torch.zeros(1, 2, 3, 8)
    layout = TreeLayout.of(merge([np.array([1, 2, 3])]).segments, CPU)
    with pytest.raises(RecipeError, match="not available yet"):
        attention.attend(module, states, states, states, None, **{attention.KEYWORD: layout}, **extra)


ALGORITHM = build(AlgorithmSection(name="rloo", kl=Kl(coef=0.3, estimator="k3")))
POLICY = scratch_policy()
SAMPLES = credited(ALGORITHM, random_groups(4))


def test_recomputing_activations_gives_bitwise_the_same_gradient():
    kept = step(POLICY, ALGORITHM, SAMPLES, token_budget=150)
    recomputed = step(POLICY, ALGORITHM, SAMPLES, token_budget=150, checkpointing=True)
    assert recomputed.recomputes and not kept.recomputes
    for name, gradient in kept.gradients.items():
        assert torch.equal(gradient, recomputed.gradients[name]), name
    assert kept.metrics == recomputed.metrics


def loss_of(policy, row):
    """A loss over one packed row, whose backward has not run yet."""
    batch = pack(row, device=policy.device, dtype=policy.dtype)
    hidden = policy.hidden(batch.tokens, batch.positions, batch.layout)
    logprobs, _ = logprobs_of(hidden[batch.sources], policy.head(), batch.targets, temperature=1.0)
    return (logprobs * batch.rows.advantage).sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_two_rows_in_flight_keep_their_own_layouts(recompute):
    policy = scratch_policy()
    weights = list(policy.trained().values())
    first, second = divide(SAMPLES, 150)[:2]
    expected = [torch.autograd.grad(loss_of(policy, row), weights) for row in (first, second)]
    if recompute:
        recompute_activations(policy.network)
    one, other = loss_of(policy, first), loss_of(policy, second)
    found = [torch.autograd.grad(one, weights), torch.autograd.grad(other, weights)]
    for before, after in zip(expected, found, strict=True):
        for gradient, same in zip(before, after, strict=True):
            assert torch.equal(gradient, same)


def test_a_change_in_one_branch_does_not_reach_another():
    policy = scratch_policy()
    prompt = list(range(16))
    rows = [[*prompt, 1, 2, 3], [*prompt, 4, 5]], [[*prompt, 1, 2, 3], [*prompt, 9, 5]]
    states = []
    for sequences in rows:
        tree = merge([np.array(sequence) for sequence in sequences])
        layout = TreeLayout.of(tree.segments, CPU)
        states.append(policy.hidden(torch.as_tensor(tree.tokens), torch.as_tensor(tree.positions), layout))
    assert len(states[0]) == 21
    changed = [place for place in range(21) if not torch.equal(states[0][place], states[1][place])]
    assert changed == [19, 20]


def test_packed_rows_of_the_whole_policy_agree_with_rows_of_one():
    together = step(POLICY, ALGORITHM, SAMPLES)
    apart = step(POLICY, ALGORITHM, *[[one] for one in SAMPLES])
    assert apart.metrics["tokens/shared"] == 0
    assert distance(together.gradients, apart.gradients) < 1e-10
