"""LoRA: what is trained, what the model is without it, and that others load what is saved."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from families import SIZES
from stretto.algorithms.base import build
from stretto.errors import RecipeError
from stretto.models.layers import expert_names, linear_layers, router_names
from stretto.models.logprob_head import Head, chunk_logits
from stretto.models.lora import add_adapter
from stretto.models.merged import merged
from stretto.models.quantised import QuantisedExperts, QuantisedLinear, quantise
from stretto.recipe.schema import Adapter, AlgorithmSection, Optimizer
from stretto.training.optimizer import MasterAdamW
from stretto.training.packing import pack
from stretto.training.trainer import Trainer
from tiny import CPU, SETTINGS, VOCABULARY, credited, policy_from, random_groups, sample, scratch_policy

RLOO = build(AlgorithmSection(name="rloo"))
SAMPLES = credited(RLOO, random_groups(1))
LORA = Adapter(rank=2, alpha=4.0)
NAMES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def trained(policy, *, updates=3):
    """The policy after some updates, and its optimizer gone."""
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=0.05), updates=updates)
    trainer = Trainer(policy, RLOO, optimizer, **SETTINGS)
    for _ in range(updates):
        trainer.accumulate(SAMPLES)
        trainer.apply()
    trainer.close()
    return policy


def hidden(policy):
    """Final states of a packed row."""
    batch = pack(SAMPLES, device=policy.device, dtype=torch.float32)
    with torch.no_grad():
        return policy.hidden(batch.tokens, batch.positions, batch.layout)


def test_only_adapters_are_trained_and_only_they_move():
    policy = scratch_policy(dtype="float32", adapter=LORA)
    names = set(policy.trained())
    assert len(names) == 2 * len(NAMES) * 2  # two matrices for each linear layer of two decoder layers
    assert all("lora_" in name for name in names)
    before = {name: weight.detach().clone() for name, weight in policy.network.named_parameters()}
    trained(policy)
    moved = {name for name, weight in policy.network.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == names


def test_adapters_are_spread_by_their_seed_alone():
    def matrices(seed):
        torch.manual_seed(17)
        policy = scratch_policy(dtype="float32", adapter=LORA, seed=seed)
        assert torch.initial_seed() == 17
        return policy.trained()

    first, again, other = matrices(1), matrices(1), matrices(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_before_training_the_adapter_changes_nothing():
    adapted, plain = scratch_policy(adapter=LORA), scratch_policy()
    assert torch.equal(hidden(adapted), hidden(plain))


def test_with_its_adapter_off_a_trained_model_is_exactly_the_base():
    policy, plain = trained(scratch_policy(dtype="float32", adapter=LORA)), scratch_policy(dtype="float32")
    assert not torch.equal(hidden(policy), hidden(plain))
    with policy.without_adapter():
        assert torch.equal(hidden(policy), hidden(plain))
    assert not torch.equal(hidden(policy), hidden(plain)), "it is on again afterwards"


def test_reference_scores_are_those_of_the_base():
    policy, plain = trained(scratch_policy(adapter=LORA)), scratch_policy()
    talks = [s.conversation for s in SAMPLES]
    trainers = [
        Trainer(p, RLOO, MasterAdamW(p.trained(), Optimizer(lr=2e-4), updates=1), **SETTINGS) for p in (policy, plain)
    ]
    for found, expected in zip(trainers[0].score(talks, without_adapter=True), trainers[1].score(talks), strict=True):
        assert found.tolist() == expected.tolist()
    for trainer in trainers:
        trainer.close()
    assert set(policy.trained()) == set(scratch_policy(adapter=LORA).trained()), "adapters still are what is trained"


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "down_proj"), ("self_attn.v_proj",)])
def test_chosen_targets_are_the_only_ones(targets):
    policy = scratch_policy(adapter=Adapter(rank=2, targets=targets))
    assert all(any(f"{target}.lora_" in name for target in targets) for name in policy.trained())
    assert len(policy.trained()) == 2 * 2 * len(targets)


@pytest.mark.parametrize("target", ["query_projection", "lm_head", "proj", "layers.7.self_attn.q_proj"])
def test_a_target_that_matches_nothing_is_refused_with_the_names_there_are(target):
    with pytest.raises(RecipeError) as caught:
        scratch_policy(adapter=Adapter(targets=("q_proj", target)))
    (problem,) = caught.value.problems
    assert problem.field == "model.adapter.targets"
    assert repr(target) in problem.reason
    assert problem.fix.endswith(", ".join(NAMES))


def test_every_target_that_matches_nothing_is_named_at_once():
    with pytest.raises(RecipeError) as caught:
        scratch_policy(adapter=Adapter(targets=("a", "q_proj", "b")))
    assert [problem.reason.split()[0] for problem in caught.value.problems] == ["'a'", "'b'"]


def test_an_untied_head_is_neither_listed_nor_adapted():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    policy = policy_from(config)
    layers = linear_layers(policy.network, policy.network.get_output_embeddings())
    assert sorted({name.rpartition(".")[2] for name in layers}) == NAMES
    add_adapter(policy.network, LORA, seed=0)
    assert not any("lm_head" in name for name in policy.trained())
    assert isinstance(policy.head(), Head)


MIXTURES = {
    "qwen3_moe": {"moe_intermediate_size": 16},
    "qwen2_moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "n_group": 1,
        "topk_group": 1, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "afmoe": {"moe_intermediate_size": 16, "num_dense_layers": 1},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "mixtral": {}, "olmoe": {}, "phimoe": {}, "granitemoe": {}, "jetmoe": {"kv_channels": 8}, "gpt_oss": {},
}  # fmt: skip
"""Mixtures of tiny sizes. Their routers are classes of their own, with a linear layer inside or none, and subclasses of
linear layers."""
PLAIN = MIXTURES.keys() - {"jetmoe", "gpt_oss"}


def mixture(family):
    """A tiny one."""
    counted = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    accepted = {"jetmoe": {"num_local_experts", "num_experts_per_tok"}}.get(family, counted)
    counted = {name: count for name, count in counted.items() if name in accepted}
    config = AutoConfig.for_model(family, **(SIZES | {"head_dim": 8} | counted | MIXTURES[family]))
    return AutoModelForCausalLM.from_config(config).requires_grad_(False)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.filterwarnings("ignore:experts")
def test_what_chooses_among_experts_stays_as_it_is_and_all_else_is_adapted(quantised):
    for family in sorted(PLAIN if quantised else MIXTURES):
        network = mixture(family)
        if quantised:
            quantise(network, "int8", CPU)
            kept = (QuantisedLinear, QuantisedExperts)
            assert not any(isinstance(network.get_submodule(name), kept) for name in router_names(network)), family
        routers, head = router_names(network), network.get_output_embeddings()
        layers, names = linear_layers(network, head), {name for name, _ in expert_names(network)}
        assert routers and bool(names) != quantised, family
        add_adapter(network, LORA, seed=0)
        trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
        assert not any(name.startswith(f"{router}.") for name in trained for router in routers), family
        assert all(f"{name}.lora_A.default.weight" in trained for name in layers), family
        adapted = {name for name in names if f"{name}.lora_A.default.weight" in trained}
        assert adapted == (names if family in PLAIN and not quantised else set()), family


def test_layers_of_a_mixture_that_peft_would_take_for_others_are_adapted_where_they_are_named():
    named = {("gate_proj",): {"gate_proj"}, ("gate_proj", "q_b_proj"): {"gate_proj", "q_b_proj"}}
    for targets, ends in {**named, "attention": {"self_attn"}}.items():
        network = mixture("deepseek_v3")
        add_adapter(network, Adapter(rank=2, targets=targets), seed=0)
        trained = [name.partition(".lora_")[0] for name, weight in network.named_parameters() if weight.requires_grad]
        assert trained and all(ends & set(name.split(".")) for name in trained)
        assert not any("experts" in name.split(".") for name in trained)


def test_what_a_mixture_amounts_to_is_what_peft_merges():
    for family in ("qwen3_moe", "deepseek_v3"):
        network = mixture(family)
        adapted = add_adapter(network, LORA, seed=0)
        for name, weight in network.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.3)
        found, expected = merged(network), adapted.merge_and_unload().state_dict()
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_adapters_compute_in_the_type_of_the_model(dtype):
    policy = scratch_policy(dtype=dtype, adapter=LORA)
    assert {weight.dtype for weight in policy.trained().values()} == {getattr(torch, dtype)}


TEXT = [{"role": "system", "content": "1"}, {"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]


def plain_logits(network):
    with torch.no_grad():
        return network(input_ids=torch.tensor([[1, 6, 7, 2, 8, 9, 0]])).logits


def own_logits(policy):
    """The policy's logits for the same tokens, through packed rows."""
    batch = pack([sample([1, 6, 7, 2, 8, 9, 0], [1])], device=policy.device, dtype=torch.float32)
    with torch.no_grad():
        return chunk_logits(policy.hidden(batch.tokens, batch.positions, batch.layout), policy.head(), 1.0)[None]


def test_a_saved_adapter_loads_with_peft_and_gives_the_same_logits(tmp_path):
    plain = scratch_policy(dtype="float32")
    plain.save(tmp_path / "base")
    policy = trained(scratch_policy(dtype="float32", adapter=LORA))
    policy.save(tmp_path / "adapter", base=tmp_path / "base")

    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (2, 4.0, 0.0)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == len(policy.trained())

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.testing.assert_close(plain_logits(base), own_logits(plain), rtol=1e-4, atol=1e-5)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(plain_logits(loaded), own_logits(policy), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(own_logits(plain), own_logits(policy), atol=1e-2)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(plain_logits(found), plain_logits(loaded))


def test_a_fully_trained_model_loads_with_transformers_and_gives_the_same_logits(tmp_path):
    policy = trained(scratch_policy(dtype="float32"))
    policy.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(plain_logits(loaded), own_logits(policy), rtol=1e-4, atol=1e-5)
    for (name, mine), (other, theirs) in zip(policy.network.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs)


def test_the_tokenizer_is_saved_with_its_chat_template(tmp_path):
    policy = scratch_policy(dtype="float32")
    policy.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for ask in (False, True):
        assert loaded.apply_chat_template(TEXT, tokenize=False, add_generation_prompt=ask) == (
            "<|system|>1<|user|>2+3=<|assistant|>5<|end|>" + "<|assistant|>" * ask
        )
    words = "<|user|>12=0<|end|>"
    assert loaded.encode(words) == policy.tokenizer.encode(words) == [1, 6, 7, 15, 5, 0]
    assert loaded.decode(loaded.encode(words)) == words
    assert loaded.eos_token_id == 0
