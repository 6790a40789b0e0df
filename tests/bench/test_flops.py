import numpy as np
import pytest
import torch

from stretto.bench.flops import ModelSizes, Pass, backward, forward, shared, step, unshared
from stretto.bench.ours import work
from stretto.bench.prepare import measures
from tiny import VOCABULARY, scratch_policy

SIZES = ModelSizes(layers=2, linear=100, head=50, attention=4)
LORA = ModelSizes(layers=2, linear=100, head=50, attention=4, adapter=10)


def test_a_pass_counts_tokens_and_the_keys_they_see():
    assert Pass.over([np.arange(3), np.arange(2, 4)], logits=1) == Pass(tokens=5, keys=1 + 2 + 3 + 3 + 4, logits=1)


def test_a_forward_is_two_per_weight_and_token_and_two_products_per_key():
    work = Pass(tokens=3, keys=6, logits=1)
    assert forward(SIZES, work) == 2 * 100 * 3 + 4 * 2 * 4 * 6 + 2 * 50 * 1
    assert forward(LORA, work) == 2 * 110 * 3 + 4 * 2 * 4 * 6 + 2 * 50 * 1


def test_a_backward_costs_frozen_weights_once_and_all_else_twice():
    work = Pass(tokens=3, keys=6, logits=1)
    assert backward(SIZES, work) == 2 * forward(SIZES, work)
    assert backward(LORA, work) == 2 * 100 * 3 + 2 * 50 * 1 + 2 * (2 * 10 * 3 + 4 * 2 * 4 * 6)


def test_a_step_generates_and_trains():
    one, other = Pass(tokens=3, keys=6, logits=1), Pass(tokens=4, keys=10, logits=1)
    assert step(SIZES, one, other) == forward(SIZES, one) + 3 * forward(SIZES, other)


def test_an_unshared_step_computes_every_prompt_with_every_answer():
    generate, train = unshared([3, 3], [2, 1])
    assert generate == Pass(tokens=4 + 3, keys=10 + 6, logits=3)
    assert train == Pass(tokens=5 + 4, keys=15 + 10, logits=3)


def test_a_shared_step_computes_a_common_prompt_once():
    generate, train = shared([3, 3], [2, 1], prefill=np.arange(3), row=np.array([0, 1, 2, 3, 4, 3]))
    assert generate == Pass(tokens=3 + 1, keys=6 + 4, logits=3)
    assert train == Pass(tokens=6, keys=15 + 4, logits=3)


def test_the_work_of_a_group_is_that_of_its_tree():
    prompt = np.arange(40)
    talks = [np.append(prompt, [1, 2]), np.append(prompt, [3])]
    found = work(talks, [40, 40])
    assert found["unshared"][1] == {"tokens": 83, "keys": 42 * 43 // 2 + 41 * 42 // 2, "logits": 3}
    assert found["shared"][0] == {"tokens": 40 + 1, "keys": 40 * 41 // 2 + 41, "logits": 3}
    assert found["shared"][1] == {"tokens": 43, "keys": 42 * 43 // 2 + 41, "logits": 3}


@pytest.mark.parametrize("adapted", [False, True])
def test_the_sizes_of_a_model_give_the_products_that_torch_counts(adapted):
    from torch.utils.flop_counter import FlopCounterMode

    from stretto.recipe.schema import Adapter

    policy = scratch_policy(dtype="float32", width=32, adapter=Adapter(rank=2) if adapted else None)
    sizes, shapes = measures(policy)
    assert sizes.linear == 2 * (4 * 32 * 32 + 3 * 32 * 128)
    assert (sizes.head, sizes.attention, sizes.layers) == (VOCABULARY * 32, 32, 2)
    assert shapes[VOCABULARY, 32] == 1
    assert sum(out * width * count for (out, width), count in shapes.items()) == sizes.linear + sizes.head
    policy.network.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        policy.network(torch.zeros(1, 5, dtype=torch.long), use_cache=False)
    whole = Pass(tokens=5, keys=25, logits=5)  # eager attention computes masked scores too
    assert counter.get_total_flops() == forward(sizes, whole)
