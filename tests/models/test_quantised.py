"""LoRA on a base of few bits: the stored weights are what everybody computes with, before and after sampling.

What a packed row on such a base comes to is held against the plain padded batch of a model that is transformers' and
PEFT's alone: with bitsandbytes' own layers for NF4, and with the weights that were stored, written out, for 8 bits.
Formats know fp32 at most, so bounds are those of fp32; that a packed tree is exact is tested in `test_padded_batch`.
"""

import copy

import bitsandbytes
import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from alone import ROUNDING, alone, drained
from families import LORA, SIZES, adapt, padded_step, sharpen
from rounding import backward_sums, longest, rounding
from stretto.algorithms.base import build
from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.errors import RecipeError
from stretto.models.few_bits import FORMATS, fp8_by_bits
from stretto.models.load import load
from stretto.models.lora import add_adapter
from stretto.models.quantised import QuantisedLinear, quantise
from stretto.recipe.schema import Adapter, AlgorithmSection
from stretto.training.trainer import Trainer
from tiers import slow_but
from tiny import CPU, SCRATCH_FILES, SETTINGS, credited, distance, policy_around, random_groups, scratch_model, step

RLOO = build(AlgorithmSection(name="rloo"))
WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 128}
"""A block of NF4 has 64 weights."""
KINDS = ["nf4", "int8", "fp8"]


def plainly(network, kind):
    """The network with what others make of a format in place of every linear layer but the head."""
    for parent in list(network.model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, name, in_four_bits(layer) if kind == "nf4" else in_eight_bits(layer, kind))
    return network.requires_grad_(False).train()


def in_four_bits(layer):
    """bitsandbytes' own layer."""
    sizes = {"compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": True}
    small = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, **sizes)
    sizes = {"quant_type": "nf4", "compress_statistics": True}
    small.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, **sizes)
    return small.to("cpu")


def in_eight_bits(layer, kind):
    """The same layer with its weights rounded, row by row."""
    rounded = copy.deepcopy(layer)
    for row in rounded.weight.data:
        most, narrow = {"int8": (127, torch.int8), "fp8": (448, torch.float8_e4m3fn)}[kind]
        scale = row.abs().max() / most
        scaled = row / scale
        row.copy_((scaled.round() if kind == "int8" else scaled).to(narrow).float() * scale)
    return rounded


@pytest.fixture(params=[(LlamaConfig, "nf4"), (Qwen3Config, "nf4"), (Qwen3Config, "int8"), (LlamaConfig, "fp8")])
def pair(request):
    """A policy, and the same weights in a model of which nothing is ours."""
    family, kind = request.param
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(family(**WIDE))
    sharpen(stock)
    mine = copy.deepcopy(stock).requires_grad_(False)
    quantise(mine, kind, CPU)
    policy = policy_around(mine)
    plainly(stock, kind)
    policy.adapted = add_adapter(policy.network, LORA, seed=0)
    adapt(stock)
    theirs = dict(stock.named_parameters())
    for name, weight in policy.network.named_parameters():
        if "lora_" in name:
            theirs[name].data.copy_(nn.init.normal_(weight.data, std=0.3))
    return policy, stock


@pytest.mark.parametrize("checkpointing", slow_but(True, of=[False, True]))
def test_a_packed_tree_on_few_bits_is_the_padded_batch_before_and_after_sampling(pair, checkpointing):
    policy, stock = pair
    samples = credited(RLOO, random_groups(1))
    loss, expected = padded_step(stock, RLOO, samples, temperature=0.9)
    packed = step(policy, RLOO, samples, temperature=0.9, checkpointing=checkpointing)
    assert packed.metrics["tokens/shared"] > 50
    close = rounding(torch.float32, *backward_sums(stock.config, longest(samples)))
    assert packed.metrics["loss"] == pytest.approx(loss, rel=close)
    assert distance(expected, packed.gradients) < close
    requests = [
        Request(key=key, tokens=np.arange(5, 12), max_new_tokens=6, stop=frozenset(), temperature=1.0) for key in (1, 2)
    ]
    engine = NativeEngine(policy)
    engine.submit(requests)
    done = drained(engine)
    for request in requests:
        answer, logprobs, _ = alone(stock, request)
        assert done[request.key].tokens.tolist() == answer
        np.testing.assert_allclose(done[request.key].logprobs, logprobs, rtol=0, atol=ROUNDING)
    policy.network.eval()
    with torch.no_grad():  # what spoils bitsandbytes' own layers
        policy.network.get_decoder().layers[0].mlp.up_proj(torch.ones(1, WIDE["hidden_size"]))
    policy.network.train()
    again = step(policy, RLOO, samples, temperature=0.9, checkpointing=checkpointing)
    assert distance(packed.gradients, again.gradients) == 0


FARTHEST = {"nf4": 0.18, "int8": 0.5 / 127, "fp8": 1 / 28}
"""Half of the largest gap between neighbors, as a share of the largest number that has the same scale."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_the_nearest_there_is_and_stored_again_it_stays(kind):
    torch.manual_seed(3)
    weight = torch.randn(24, 64)
    weight[5] = 0
    stored = FORMATS[kind].store(weight)
    wide = FORMATS[kind].wide(stored, (24, 64))
    largest = weight.abs().amax(1, keepdim=True)
    assert ((wide - weight).abs() <= largest * FARTHEST[kind] + 1e-7).all()
    assert not wide[5].any()
    again = FORMATS[kind].wide(FORMATS[kind].store(wide), (24, 64))
    assert torch.allclose(again, wide, rtol=1e-6, atol=0) or kind == "nf4", "whose scales are rounded too"
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        matrix, scales = FORMATS[kind].factors(stored, (24, 64), dtype)
        assert (scales is not None) == (dtype == torch.bfloat16 and kind != "nf4")
        factors = matrix if scales is None else matrix.float() * scales[:, None]
        assert torch.equal(factors, wide.to(dtype) if scales is None else wide), "numbers of 8 bits are exact in bf16"
    bits = 8 * (stored.weight.nbytes + stored.scales.nbytes) / weight.numel()
    assert bits == {"nf4": 4 + 8 * 32 / 1536, "int8": 8.5, "fp8": 8.5}[kind]


def test_every_number_of_fp8_is_read_from_its_bits_as_torch_reads_it():
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]  # NaN, which nothing is stored as
    assert torch.equal(fp8_by_bits(codes), codes.view(torch.float8_e4m3fn).to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(24, 32), (8, 96), (64, 12), (96, 8), (4, 608)])
def test_blocks_of_four_bits_follow_each_other_past_the_ends_of_rows(shape):
    torch.manual_seed(3)
    weight = torch.randn(shape)
    stored = FORMATS["nf4"].store(weight)
    flat = FORMATS["nf4"].wide(stored, (weight.numel() // 64, 64))
    assert torch.equal(FORMATS["nf4"].wide(stored, shape), flat.view(shape))
    for narrow in (torch.bfloat16, torch.float16):  # the processor decides how it is read, and not what is read
        assert torch.equal(FORMATS["nf4"].wide(stored, shape, narrow), flat.view(shape).to(narrow))
    blocks = weight.view(-1, 64)
    assert ((flat - blocks).abs() <= blocks.abs().amax(1, keepdim=True) * FARTHEST["nf4"] + 1e-7).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_recipes_model_is_stored_once_whatever_it_computes_in(dtype):
    section = scratch_model(dtype=dtype, width=64, adapter={"kind": "lora", "rank": 3, "alpha": 6})
    policy = load(section.model_copy(update={"quantize": "nf4"}), SCRATCH_FILES, seed=0, device=CPU)
    plain = load(section, SCRATCH_FILES, seed=0, device=CPU)
    assert policy.dtype == plain.dtype == getattr(torch, dtype)
    assert policy.trained().keys() == plain.trained().keys()
    assert all(torch.equal(weight, plain.trained()[name]) for name, weight in policy.trained().items())
    layers = [layer for layer in policy.network.modules() if isinstance(layer, QuantisedLinear)]
    assert len(layers) == 2 * 7
    twin = dict(plain.network.named_modules())
    for name, layer in policy.network.named_modules():
        if isinstance(layer, QuantisedLinear):
            layer.to(torch.float32)
            expected = FORMATS["nf4"].wide(FORMATS["nf4"].store(twin[name].weight.detach().float()), (
                layer.out_features, layer.in_features,
            ))  # fmt: skip
            assert torch.equal(layer.wide(torch.float32), expected)
    talks = [sample.conversation for sample in credited(RLOO, random_groups(1))]
    trainer = Trainer(policy, RLOO, None, **SETTINGS)
    off, on = trainer.score(talks, without_adapter=True), trainer.score(talks)
    trainer.close()
    assert all((one == other).all() for one, other in zip(off, on, strict=True)), "a fresh adapter adds nothing"


def test_attention_alone_can_be_adapted():
    policy = load(scratch_model(adapter=Adapter(rank=2, targets="attention")), SCRATCH_FILES, seed=0, device=CPU)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in policy.trained()} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip


EXPERTS = WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_stored_in_few_bits_too(kind):
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**EXPERTS), experts_implementation="eager")
    sharpen(stock)
    mine = copy.deepcopy(stock).requires_grad_(False)
    before = sum(weight.nbytes for weight in mine.model.layers.parameters())
    quantise(mine, kind, CPU)
    assert sum(weight.nbytes for weight in mine.model.layers.parameters()) < before * {"nf4": 0.2}.get(kind, 0.32)
    with torch.no_grad():
        for layer, twin in zip(mine.model.layers, stock.model.layers, strict=True):
            for name in ("gate_up_proj", "down_proj"):
                for index, weight in enumerate(getattr(twin.mlp.experts, name)):
                    weight.copy_(getattr(layer.mlp.experts, name)[index].wide(torch.float32))
            for name, module in layer.named_modules():
                if isinstance(module, QuantisedLinear):
                    twin.get_submodule(name).weight.copy_(module.wide(torch.float32))
    policy, plain = policy_around(mine), policy_around(stock.requires_grad_(False))
    for each in (policy, plain):
        each.adapted = add_adapter(each.network, LORA.model_copy(update={"targets": "attention"}), seed=0)
    samples = credited(RLOO, random_groups(1))
    found, expected = (step(each, RLOO, samples, checkpointing=True) for each in (policy, plain))
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert distance(expected.gradients, found.gradients) < 1e-4


def test_who_adapts_all_layers_is_told_that_experts_in_few_bits_are_not_among_them():
    network = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**EXPERTS)).requires_grad_(False)
    quantise(network, "int8", CPU)
    with pytest.warns(UserWarning, match="experts in few bits stay as they are"):
        add_adapter(network, LORA, seed=0)
    assert not any("experts" in name for name, weight in network.named_parameters() if weight.requires_grad)


def test_what_cannot_be_stored_in_few_bits_is_refused():
    experts = GptOssConfig(**WIDE, num_local_experts=2, num_experts_per_tok=1, head_dim=16)
    conv = GPT2Config(vocab_size=16, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    for config, reason in ((experts, "GptOssExperts"), (conv, r"only 0% of the weights.* stored as in Conv1D")):
        with pytest.raises(RecipeError, match=reason):
            quantise(AutoModelForCausalLM.from_config(config), "int8", CPU)


def test_linear_layers_of_another_class_are_stored_and_convolutions_are_not():
    falcon = FalconConfig(vocab_size=16, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    conv = Lfm2Config(**WIDE, layer_types=["conv", "full_attention"])
    for config, kind in ((falcon, "FalconLinear"), (conv, "Linear")):
        network = AutoModelForCausalLM.from_config(config)
        wanted = {name for name, layer in network.named_modules() if type(layer).__name__ == kind} - {"lm_head"}
        name = min(wanted)
        states = torch.randn(3, network.get_submodule(name).in_features)
        expected = network.get_submodule(name)(states).detach()
        quantise(network, "int8", CPU)
        assert {name for name, layer in network.named_modules() if isinstance(layer, QuantisedLinear)} == wanted
        assert distance({"": expected}, {"": network.get_submodule(name)(states).detach()}) < 0.02
