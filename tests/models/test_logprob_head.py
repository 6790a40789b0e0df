"""The chunked head gives what autograd gives over the full logits, without ever holding them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.kernels.cpu.logprob_kernels import logprob_kernels
from stretto.models import logprob_head as module
from stretto.models.logprob_head import Head, accum_dtype, chunks, logprobs_of

WIDTH, VOCABULARY = 6, 11
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def by_autograd(hidden, head, targets, *, temperature):
    """Log-probabilities and entropies through a full matrix of logits."""
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def random_head(seed, *, rows, bias, softcap, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    hidden, weight = tensor(rows, WIDTH, scale=2.0), tensor(VOCABULARY, WIDTH)
    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    outgoing = torch.randn(rows, generator=generator, dtype=torch.float64)
    return hidden, Head(weight=weight, bias=tensor(VOCABULARY) if bias else None, softcap=softcap), targets, outgoing


def gradients(function, hidden, head, targets, outgoing, *, temperature):
    """(log-probabilities, entropies, gradients) of a function of the head."""
    logprobs, entropies = function(hidden, head, targets, temperature=temperature)
    leaves = [leaf for leaf in (hidden, head.weight, head.bias) if leaf is not None and leaf.requires_grad]
    return logprobs.detach(), entropies.detach(), torch.autograd.grad((logprobs * outgoing).sum(), leaves)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    numbers=st.sampled_from([1, VOCABULARY, 2 * VOCABULARY, 3 * VOCABULARY + 5, 10**6]),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    seed=st.integers(0, 1000),
)
def test_everything_equals_autograd_over_the_full_logits(rows, numbers, bias, softcap, temperature, seed):
    hidden, head, targets, outgoing = random_head(seed, rows=rows, bias=bias, softcap=softcap)
    expected = gradients(by_autograd, hidden, head, targets, outgoing, temperature=temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_NUMBERS", numbers)
        found = gradients(logprobs_of, hidden, head, targets, outgoing, temperature=temperature)
    torch.testing.assert_close(found[0], expected[0], **TIGHT)
    torch.testing.assert_close(found[1], expected[1], **TIGHT)
    assert len(found[2]) == (3 if bias else 2)
    for one, other in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_a_frozen_head_gets_no_gradient_and_hands_on_the_same_one():
    hidden, head, targets, outgoing = random_head(3, rows=5, bias=True, softcap=None)
    frozen = Head(weight=head.weight.detach(), bias=head.bias.detach())
    free = gradients(by_autograd, hidden, head, targets, outgoing, temperature=0.8)[2][0]
    (found,) = gradients(logprobs_of, hidden, frozen, targets, outgoing, temperature=0.8)[2]
    torch.testing.assert_close(found, free, **TIGHT)


def test_a_head_can_be_trained_over_frozen_states():
    hidden, head, targets, outgoing = random_head(4, rows=5, bias=True, softcap=None)
    expected = gradients(by_autograd, hidden.detach(), head, targets, outgoing, temperature=1.0)[2]
    found = gradients(logprobs_of, hidden.detach(), head, targets, outgoing, temperature=1.0)[2]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_two_backwards_through_one_forward_add_up():
    hidden, head, targets, outgoing = random_head(5, rows=6, bias=False, softcap=3.0)
    logprobs, _ = logprobs_of(hidden, head, targets, temperature=0.6)
    (first,) = torch.autograd.grad((logprobs * outgoing).sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad((logprobs * outgoing).sum(), hidden)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_entropies_carry_no_gradient():
    hidden, head, targets, _ = random_head(6, rows=4, bias=False, softcap=None)
    _, entropies = logprobs_of(hidden, head, targets, temperature=1.0)
    assert not entropies.requires_grad


def test_no_rows_are_no_log_probabilities():
    hidden, head, targets, _ = random_head(7, rows=0, bias=True, softcap=None)
    logprobs, entropies = logprobs_of(hidden, head, targets, temperature=1.0)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_get_wide_log_probabilities_and_gradients_in_their_own_type(dtype):
    hidden, head, targets, outgoing = random_head(8, rows=5, bias=True, softcap=None, dtype=dtype)
    wide_head = Head(weight=head.weight.detach().double(), bias=head.bias.detach().double())
    expected, _ = by_autograd(hidden.detach().double(), wide_head, targets, temperature=1.0)
    logprobs, entropies, grads = gradients(logprobs_of, hidden, head, targets, outgoing, temperature=1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [dtype] * 3
    torch.testing.assert_close(logprobs.double(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("narrow", "normaliser"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_kept_in_single_precision_or_better(narrow, normaliser):
    assert accum_dtype(narrow) == normaliser


@given(rows=st.integers(0, 50), vocabulary=st.integers(1, 40), numbers=st.integers(1, 200))
def test_chunks_cover_every_row_once_and_hold_no_more_logits_than_allowed(rows, vocabulary, numbers):
    pieces = chunks(rows, vocabulary, numbers)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size == 1 or size * vocabulary <= numbers for size in sizes)


def test_no_tensor_of_all_logits_is_ever_made(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 2 * VOCABULARY)
    largest = []
    original = module.linear

    def watched(hidden, weight, bias):
        logits = original(hidden, weight, bias)
        largest.append(logits.numel())
        return logits

    monkeypatch.setattr(module, "linear", watched)
    hidden, head, targets, outgoing = random_head(9, rows=9, bias=True, softcap=None)
    gradients(logprobs_of, hidden, head, targets, outgoing, temperature=1.0)
    assert len(largest) == 10  # five chunks, once in the forward and once in the backward
    assert max(largest) == 2 * VOCABULARY


@pytest.mark.parametrize(("numbers", "products"), [(9 * VOCABULARY, 1), (8 * VOCABULARY, 4)])
def test_logits_of_one_chunk_are_kept_for_one_backward(monkeypatch, numbers, products):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", numbers)
    made = []
    original = module.linear
    monkeypatch.setattr(module, "linear", lambda *operands: made.append(operands) or original(*operands))
    hidden, head, targets, outgoing = random_head(4, rows=9, bias=False, softcap=None)
    loss = (logprobs_of(hidden, head, targets, temperature=1.0)[0] * outgoing).sum()
    first = torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True)
    assert len(made) == products
    second = torch.autograd.grad(loss, [hidden, head.weight])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_over_kept_tokens_everything_equals_autograd_over_masked_logits(rows, softcap, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 4 * VOCABULARY)
    hidden, head, targets, outgoing = random_head(rows, rows=rows, bias=True, softcap=softcap)
    generator = torch.Generator().manual_seed(rows)
    kept = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:5] for _ in range(rows)]).int()
    kept[:, 0] = targets
    kept[1::2, 3:] = -1
    for row in range(rows):  # the target once
        kept[row, 1:][kept[row, 1:] == targets[row]] = -1

    def masked(hidden, head, targets, *, temperature):
        logits = hidden @ head.weight.T + head.bias
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        left = torch.zeros(rows, VOCABULARY + 1, dtype=torch.bool).scatter(1, kept.long() % (VOCABULARY + 1), True)
        logprobs = (logits / temperature).masked_fill(~left[:, :-1], float("-inf")).log_softmax(-1)
        entropies = -torch.where(left[:, :-1], logprobs.exp() * logprobs, 0.0).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropies

    def ours(hidden, head, targets, *, temperature):
        return logprobs_of(hidden, head, targets, temperature=temperature, kept=kept)

    expected = gradients(masked, hidden, head, targets, outgoing, temperature=0.7)
    found = gradients(ours, hidden, head, targets, outgoing, temperature=0.7)
    for one, other in zip([*found[:2], *found[2]], [*expected[:2], *expected[2]], strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
@pytest.mark.parametrize("vocabulary", [1, 1023, 1025, 5000])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_kernels_in_c_equal_autograd(dtype, close, vocabulary, temperature):
    kernels = logprob_kernels(dtype)
    assert kernels is not None
    generator = torch.Generator().manual_seed(vocabulary)
    raw = (6 * torch.randn(5, vocabulary, generator=generator)).to(dtype)
    targets = torch.randint(0, vocabulary, (5,), generator=generator, dtype=torch.int32)
    outgoing = torch.randn(5, generator=generator)
    logits = raw.double().requires_grad_()
    logs = (logits / temperature).log_softmax(-1)
    chosen = logs.gather(-1, targets[:, None].long())[:, 0]
    (slopes,) = torch.autograd.grad(chosen, logits, outgoing.double(), retain_graph=True)
    found = kernels.forward(raw, targets, temperature)
    expected = chosen, (logits / temperature).logsumexp(-1), -(logs.exp() * logs).sum(-1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-6, atol=1e-5)
    kernels.backward(raw, targets, found[1], outgoing, temperature)
    torch.testing.assert_close(raw.double(), slopes, rtol=close, atol=close * 0.1)


def test_kernels_in_c_see_no_token_that_is_none_and_keep_what_is_no_number():
    kernels = logprob_kernels(torch.float32)
    raw = torch.randn(2, 40)
    for wrong in (-100, 40):
        with pytest.raises(IndexError, match="no token"):
            kernels.forward(raw, torch.tensor([3, wrong]), 1.0)
    raw[0, 7], raw[1, 7] = float("-inf"), float("nan")
    logprobs, normalisers, entropies = kernels.forward(raw, torch.tensor([3, 3]), 1.0)
    logs = raw[0].log_softmax(-1)
    assert logprobs[1].isnan() and normalisers[1].isnan() and entropies[1].isnan()
    torch.testing.assert_close(logprobs[0], logs[3])
    torch.testing.assert_close(entropies[0], -(logs.exp() * logs.nan_to_num(neginf=0)).sum())
    assert kernels.forward(raw, torch.tensor([7, 3]), 1.0)[0][0] == float("-inf")
