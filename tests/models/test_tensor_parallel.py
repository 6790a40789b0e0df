"""A model in parts computes what it computes in one piece: loss and gradients, whatever is cut and how."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from cut import CASES, CONFIGS, gradients_of, in_parts, policy_of, samples_of
from families import SIZES
from processes import run_together
from stretto.errors import RecipeError
from stretto.models.cut_collectives import Ranks
from stretto.models.parameter_cut import ParameterCut
from stretto.models.tensor_parallel import cut_network, cut_problems
from tiny import CPU


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The folder in which four processes have left what they came to."""
    folder = tmp_path_factory.mktemp("parts")
    run_together(in_parts, 4, folder)
    return folder


def alone(family, adapter):
    """The same in one process."""
    policy = policy_of(family, adapter)
    held = sum(weight.numel() for weight in policy.network.get_decoder().layers.parameters())
    gradients, sums = gradients_of(policy, (*samples_of(0), *samples_of(1)), adapter == "recomputed")
    return {f"{kind} {name}": each for kind, part in gradients.items() for name, each in part.items()}, sums, held


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way", "adapter"), CASES)
def test_parts_of_a_model_have_its_loss_and_its_gradients(family, way, adapter, parts):
    told = torch.load(parts / f"{family} {way} {adapter}.pt")
    gradients, sums, held = alone(family, adapter)
    assert told["held"] < 0.9 * held
    assert told["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(told["gradients"][name], gradient, rtol=1e-10, atol=1e-10 * gradient.abs().max()), name
    for name in [name for name in sums if name.startswith("loss/") or name in ("tokens", "k3", "entropy")]:
        assert told["sums"][name] == pytest.approx(sums[name], rel=1e-10)


def without_weights(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def refusal(config, **how):
    """Field and reason of what is refused."""
    return [(problem.field, problem.reason) for problem in cut_problems(without_weights(config), **how)]


def test_what_does_not_divide_is_refused_before_there_are_weights():
    assert refusal(CONFIGS["mixtral"](), tensor=2) == []
    assert refusal(CONFIGS["mixtral"](), tensor=4) == [], "two processes have the same key-value head"
    three = LlamaConfig(**(SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}))
    assert refusal(three, tensor=2) == [("placement.cells", "tp 2 does not divide the model's 3 key-value heads")]
    assert refusal(CONFIGS["mixtral"](), tensor=1, experts=3) == [
        ("placement.cells", "ep 3 does not divide the model's 4 experts")
    ]
    odd = LlamaConfig(**(SIZES | {"num_attention_heads": 6, "hidden_size": 48, "intermediate_size": 50}))
    ((_, reason),) = refusal(odd, tensor=4)
    assert reason == "tp 4 does not divide the model's 6 heads, 50 numbers inside a feed-forward layer"
    assert cut_problems(without_weights(odd), tensor=4)[0].fix == "use tp 1 or 2"


def test_what_is_not_cut_is_refused():
    assert refusal(LlamaConfig(**SIZES, attention_bias=True), tensor=2) == [
        ("placement.cells", "llama: layers whose inputs are cut have biases, which is not available yet")
    ]
    ((_, reason),) = refusal(GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4), tensor=2)
    assert reason == "gpt2: transformers has no plan for cutting its matrices"
    ((_, reason),) = refusal(CONFIGS["qwen2"](), tensor=1, experts=1)
    assert reason == "qwen2: there are no experts that could be spread"


def test_a_model_that_is_refused_stays_as_it_was():
    network = policy_of("qwen2", None).network
    before = {name: weight.shape for name, weight in network.named_parameters()}
    with pytest.raises(RecipeError, match="tp 3 does not divide"):
        cut_network(network, tensor=Ranks(0, 3, None))
    assert {name: weight.shape for name, weight in network.named_parameters()} == before


@pytest.mark.parametrize(("dim", "blocks"), [(0, 1), (1, 1), (1, 2), (1, 3)])
def test_the_parts_of_a_parameter_make_the_whole(dim, blocks):
    full = torch.arange(4 * 12 * 2).view(4, 12, 2)
    cuts = [ParameterCut(dim=dim, blocks=blocks, rank=rank, size=2) for rank in range(2)]
    parts = [cut.part(full) for cut in cuts]
    assert torch.equal(cuts[0].whole(parts), full)
    for cut, part in zip(cuts, parts, strict=True):
        assert torch.equal(part, full.index_select(dim, cut.numbers(full.shape[dim], CPU)))
