"""The three estimators of KL, worked out by hand."""

import math

import numpy as np
import pytest
import torch

from stretto.algorithms.kl import ESTIMATORS, k1, k2, k3

POLICY = [-0.2, -1.1, -0.25, -2.2, -0.6, -0.3, -0.5, -2.6, -0.1, -0.1]
REFERENCE = [-0.6, -1.0, -0.3, -1.4, -0.8, -0.3, -1.0, -1.9, -0.2, -0.5]
U = [-0.4, 0.1, -0.05, 0.8, -0.2, 0.0, -0.5, 0.7, -0.1, -0.4]
"""reference - policy, by hand."""


def test_k1_is_the_log_ratio():
    by_hand = (0.4 - 0.1 + 0.05 - 0.8 + 0.2 + 0 + 0.5 - 0.7 + 0.1 + 0.4) / 10
    assert by_hand == pytest.approx(0.005)
    assert k1(np.array(POLICY), np.array(REFERENCE)).mean() == pytest.approx(by_hand, rel=1e-12)


def test_k2_is_half_the_squared_log_ratio():
    by_hand = (0.16 + 0.01 + 0.0025 + 0.64 + 0.04 + 0 + 0.25 + 0.49 + 0.01 + 0.16) / 2 / 10
    assert by_hand == pytest.approx(0.088125)
    assert k2(np.array(POLICY), np.array(REFERENCE)).mean() == pytest.approx(by_hand, rel=1e-12)


def test_k3_is_the_exponential_less_its_tangent():
    by_hand = sum(math.exp(u) - 1 - u for u in U) / 10
    assert by_hand == pytest.approx(0.101643, abs=5e-7)
    assert k3(np.array(POLICY), np.array(REFERENCE)).mean() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_arrays_and_tensors_give_the_same_numbers(name):
    arrays = ESTIMATORS[name](np.array(POLICY), np.array(REFERENCE))
    tensors = ESTIMATORS[name](torch.tensor(POLICY, dtype=torch.float64), torch.tensor(REFERENCE, dtype=torch.float64))
    np.testing.assert_allclose(tensors.numpy(), arrays, rtol=1e-14)


def test_k3_keeps_its_digits_where_policy_and_reference_nearly_agree():
    tiny = 1e-6  # exp(u) - 1 - u would cancel to nothing in fp32; the series says u^2 / 2
    found = k3(torch.tensor([0.0]), torch.tensor([tiny]))
    assert float(found) == pytest.approx(0, abs=1e-12)
    assert float(k3(np.array(0.0), np.array(tiny))) == pytest.approx(tiny**2 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "slope"),
    [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))],
)
def test_as_a_loss_each_pulls_with_its_own_slope(name, slope):
    for difference in (-0.7, 0.0, 0.4):  # policy - reference
        policy = torch.tensor(-1.0 + difference, dtype=torch.float64, requires_grad=True)
        ESTIMATORS[name](policy, torch.tensor(-1.0, dtype=torch.float64)).backward()
        assert float(policy.grad) == pytest.approx(slope(difference), rel=1e-12)


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_reverse_kl():
    logits = torch.tensor([0.3, -1.0, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), kl, rtol=1e-12, atol=0)
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    on_policy = (policy.exp().detach() * k2(policy, reference)).sum()
    (found,) = torch.autograd.grad(on_policy, logits)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-15)
