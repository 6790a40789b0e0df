"""The parts of decode steps in C give what plain operations give."""

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from stretto.engines.native.sampling import _block_weights
from stretto.kernels.cpu import decode_kernels
from stretto.kernels.cpu.decode_kernels import HeadTurn

BITS = {torch.bfloat16: 1.6e-2, torch.float32: 2e-6}


@pytest.fixture(params=BITS, ids=str)
def kernels(request):
    found = decode_kernels.decode_kernels(request.param)
    assert found is not None
    return found


def random(kernels, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(kernels.dtype)


def same(found, expected, kernels):
    assert found.shape == expected.shape
    apart = (found.float() - expected.float()).abs()
    assert (apart <= BITS[kernels.dtype] * expected.float().abs().clamp(min=1)).all(), apart.max()


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 40), (70, 576), (5, 17)])
def test_norms_and_gates(kernels, rows, width):
    states, weight, both = (
        random(kernels, rows, width),
        random(kernels, width, seed=1),
        random(kernels, rows, 2 * width),
    )
    layers = kernels.layers
    same(layers.norm(states, weight, 1e-5), rms_norm(states, (width,), weight, 1e-5), kernels)
    gates, ups = (20 * both).chunk(2, dim=-1)  # far into both ends of the sigmoid
    same(layers.gate(gates, ups), silu(gates) * ups, kernels)


@pytest.mark.parametrize(("vocabulary", "block"), [(1000, 256), (256, 256), (300, 7)])
def test_blocks_of_logits_are_weighed(kernels, vocabulary, block):
    products, temperatures = 8 * random(kernels, 5, vocabulary), torch.tensor([[1.0], [0.3], [1.0], [2.0], [0.7]])
    products[0, 3] = float("-inf")
    products[2, :block] = float("-inf")  # a block of nothing
    found = kernels.weigh(products, temperatures, block)
    parts = (products.float() / temperatures).split(block, -1)
    expected = torch.stack([part.logsumexp(-1) for part in parts], dim=1)
    assert found.isneginf().tolist() == expected.isneginf().tolist()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if block == 256:
        assert vocabulary != 256 or torch.equal(found.isfinite(), _block_weights(products.float()).isfinite())


def test_what_is_no_number_stays_none(kernels):
    products = random(kernels, 2, 40)
    products[1, 5] = float("nan")
    products[0, 20:] = float("nan")
    found = kernels.weigh(products, torch.ones(2, 1), 20)
    assert found.isnan().tolist() == [[False, True], [True, False]]
    gates, ups = torch.tensor([[float("-inf"), -1e30, 1e30, 1.0, 1.0, 2.0]], dtype=kernels.dtype).chunk(2, dim=-1)
    torch.testing.assert_close(kernels.layers.gate(gates, ups), silu(gates) * ups, equal_nan=True)
    states = random(kernels, 2, 16)
    states[0, 0] = float("nan")
    assert kernels.layers.norm(states, torch.ones(16, dtype=kernels.dtype), 1e-5)[0].isnan().all()


def attention(query, keys, values, *, seen, scale):
    """(H, D) of one token's queries, over the places that it sees."""
    told, groups = len(keys), len(query) // len(keys)
    found = []
    for head in range(len(query)):
        known, said = (each[head // groups, seen].double() for each in (keys, values))
        found.append(((known @ query[head].double()) * scale).softmax(-1) @ said)
    assert told * groups == len(query)
    return torch.stack(found)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("size", "asking", "told"), [(64, 9, 3), (128, 4, 4), (24, 6, 1), (80, 8, 2), (6, 2, 1)])
@pytest.mark.parametrize("width", [1, 3])
def test_attention_over_what_sequences_keep(kernels, size, asking, told, width, window):
    before = torch.tensor([0, 7, 31, 32, 61])
    n, capacity = len(before), 64
    heads = random(kernels, n * width, asking + 2 * told, size)
    keys, values = (random(kernels, n, told, capacity, size, seed=seed) for seed in (1, 2))
    kept = keys.clone(), values.clone()
    query, key, value = heads.split((asking, told, told), dim=1)
    where = {"keys": keys, "values": values, "before": before, "window": window}
    assert kernels.attends(query, key, value)
    found, totals = kernels.attend(query, key, value, **where, scale=size**-0.5)
    for row, length in enumerate(before.tolist()):
        for states, new, old in ((keys, key, kept[0]), (values, value, kept[1])):
            assert torch.equal(
                states[row, :, length : length + width], new[row * width : (row + 1) * width].transpose(0, 1)
            )
            assert torch.equal(states[row, :, :length], old[row, :, :length])
            assert torch.equal(states[row, :, length + width :], old[row, :, length + width :])
        for token in range(width):
            end, place = length + token + 1, row * width + token
            seen = range(max(0, end - window) if window else 0, end)
            expected = attention(heads[place, :asking], keys[row], values[row], seen=list(seen), scale=size**-0.5)
            same(found[place], expected, kernels)
    assert totals.shape == (n * width, asking) and totals.isfinite().all()


@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_turned_where_they_are(kernels, normed):
    tokens, asking, told, size = 4, 4, 2, 32
    heads = random(kernels, tokens, asking + 2 * told, size)
    angles = random(kernels, tokens, 1, size // 2, seed=1).repeat(1, 1, 2)
    cosine, sine = angles.cos(), angles.sin()
    signed = torch.cat([-sine[..., : size // 2], sine[..., size // 2 :]], dim=-1)
    weights = tuple(random(kernels, 2, size, seed=2)) if normed else None
    expected = heads[:, : asking + told].clone()
    if weights is not None:
        parts = expected.split((asking, told), dim=1)
        expected = torch.cat([rms_norm(p, (size,), w, 1e-6) for p, w in zip(parts, weights, strict=True)], dim=1)
    # As transformers turn them, rounded at the same places.
    halves = torch.cat([-expected[..., size // 2 :], expected[..., : size // 2]], dim=-1)
    expected = expected * cosine + halves * sine
    query, key, value = heads.split((asking, told, told), dim=1)
    keys, values = (torch.zeros(tokens, told, 64, size, dtype=kernels.dtype) for _ in range(2))
    kernels.attend(
        query,
        key,
        value,
        keys=keys,
        values=values,
        before=torch.zeros(tokens, dtype=torch.long),
        scale=1.0,
        window=None,
        turn=HeadTurn(cosine, signed, weights, 1e-6),
    )
    same(heads[:, : asking + told], expected, kernels)
    assert torch.equal(keys[:, :, 0], heads[:, asking : asking + told])


def test_they_are_not_asked_about_heads_that_lie_otherwise(kernels):
    heads = random(kernels, 3, 8, 16)
    query, rest = heads[:, :4], heads[:, 4:]
    assert kernels.attends(query, rest, rest)
    assert not kernels.attends(query.transpose(0, 1).contiguous().transpose(0, 1), rest, rest)
    assert not kernels.attends(query.double(), rest, rest)
    assert not kernels.attends(query, rest, rest[..., :8])
    alone = rest[:, :1].transpose(0, 1).contiguous().transpose(0, 1)  # of one head, whose stride nobody reads
    assert alone.stride(1) != 16 and kernels.attends(query, alone, alone)
