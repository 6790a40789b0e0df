"""Parameter counts against what the models' cards say; shapes from names, numbers and config.json files."""

import copy
import json

import pytest
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Starcoder2Config,
)

from families import SIZES
from stretto.errors import RecipeError
from stretto.models.lora import add_adapter
from stretto.planner.cost.families import FAMILIES
from stretto.planner.cost.shapes import named_shape, read_config, shape_of
from stretto.planner.workload import adapted
from stretto.recipe.schema import Adapter, Shape
from tiny import VOCABULARY


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-7b", 6.74, None),
        ("llama-13b", 13.0, None),
        ("llama-33b", 32.5, None),
        ("llama-65b", 65.2, None),
        ("llama3-8b", 8.03, None),
        ("llama3-70b", 70.6, None),
        ("qwen2.5-0.5b", 0.494, None),
        ("qwen2.5-7b", 7.62, None),
        ("qwen2.5-72b", 72.7, None),
        ("qwen3-0.6b", 0.596, None),
        ("qwen3-32b", 32.8, None),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("mixtral-8x7b", 46.7, 12.9),
        ("deepseek-v3", 671, 37),
        ("kimi-k2", 1026, 32),
        ("glm-4.5", 355, 32),
        ("gemma-7b", 8.54, None),
        ("gemma2-27b", 27.2, None),
        ("smollm2-135m", 0.1345, None),
        ("opt-66b", 65.7, None),
    ],
)
def test_parameters_are_those_of_the_models_card(name, billions, active):
    shape = named_shape(name)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.01)
    if active is not None:  # cards count the input embedding too, which takes part in no product
        assert (shape.active_params + shape.embedding_params) / 1e9 == pytest.approx(active, rel=0.07)


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("qwen2.5-1.5b", 28.7), ("qwen2.5-7b", 57.3), ("llama3-8b", 131), ("qwen3-32b", 262), ("llama3-70b", 328),
     ("qwen3-30b-a3b", 98), ("deepseek-v3", 70)],
)  # fmt: skip
def test_cache_bytes_per_token_are_the_known_ones(name, kilobytes):
    assert named_shape(name).kv_bytes(1) / 1e3 == pytest.approx(kilobytes, rel=0.01)


def test_a_windowed_layer_caches_no_more_than_its_window():
    shape = named_shape("gemma3-27b")
    assert shape.kv_bytes(100_000) < 0.2 * 100_000 * shape.kv_bytes(1)


LORAS = {
    "llama": LlamaConfig(**SIZES),
    "phi3": Phi3Config(**SIZES),
    "phi": PhiConfig(**SIZES),
    "glm4": Glm4Config(**SIZES, head_dim=8),
    "gpt_neox": GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
    "starcoder2": Starcoder2Config(**SIZES),
    "opt": OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=48,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", LORAS)
@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_the_size_of_an_adapter_is_that_of_the_one_that_is_trained(tmp_path, family, targets):
    config, adapter = copy.deepcopy(LORAS[family]), Adapter(rank=3, targets=targets)
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    weights = sum(weight.numel() for name, weight in network.named_parameters() if weight.dim() > 1)
    add_adapter(network, adapter, seed=0)
    made = sum(weight.numel() for name, weight in network.named_parameters() if "lora_" in name)
    shape = read_config(tmp_path / "config.json")
    assert adapted(shape, adapter, few_bits=False).trained(adapter.rank) == (made, 0)
    if family != "opt":  # which has an embedding of positions, too
        assert shape.params == weights


def test_every_family_can_be_counted():
    assert all(0 < shape.active_params <= shape.params for shape in FAMILIES.values())


@pytest.mark.parametrize("spelling", ["Qwen/Qwen3-32B", "qwen3-32b", "Qwen3_32B", "qwen3-32b-base"])
def test_a_name_is_found_in_several_spellings(spelling):
    assert named_shape(spelling) is FAMILIES["qwen3-32b"]


def test_an_unknown_name_is_answered_with_the_nearest_and_with_how_to_give_numbers():
    with pytest.raises(RecipeError, match="qwen3-32b") as refused:
        shape_of("qwen3-33b", field="roles.critic.shape")
    assert refused.value.problems[0].field == "roles.critic.shape"
    assert "layers" in refused.value.problems[0].fix


def test_numbers_of_a_recipe_make_the_same_shape_as_the_name():
    told = Shape(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936)
    known = named_shape("qwen3-32b")
    assert (shape_of(told).params, shape_of(told).kv_bytes(7)) == (known.params, known.kv_bytes(7))


def test_what_numbers_leave_out_is_derived():
    shape = shape_of(Shape(layers=2, hidden=128, heads=4, ffn=512, vocab=100, experts=4))
    assert (shape.kv_heads, shape.head_dim, shape.top_k, shape.expert_ffn) == (4, 32, 2, 512)


def config(folder, **values):
    told = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
            "vocab_size": 50, **values}  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(told))
    return path


def test_a_folder_with_a_config_is_a_shape(tmp_path):
    config(tmp_path, num_key_value_heads=2, tie_word_embeddings=True)
    shape = named_shape(str(tmp_path))
    assert (shape.kv_heads, shape.head_dim, shape.tied) == (2, 16, True)
    assert shape.params == 2 * (64 * 16 * (4 + 2 + 2) + 64 * 64 + 3 * 64 * 128) + 50 * 64


def test_a_config_of_latent_attention_and_experts_is_understood(tmp_path):
    path = config(
        tmp_path, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, intermediate_size=18432,
        vocab_size=129280, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
        n_shared_experts=1, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, num_key_value_heads=128,
    )  # fmt: skip
    assert read_config(path).params == named_shape("deepseek-v3").params


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gemma3-4b", {"model_type": "gemma3_text", "sliding_window": 1024}),
        ("gemma3-1b", {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}),
        ("gemma2-2b", {"model_type": "gemma2", "sliding_window": 4096}),
        ("gpt-oss-20b", {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}),
        ("qwen2.5-7b", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}),
    ],
)
def test_a_folder_knows_windows_as_the_name_does(tmp_path, name, values):
    known = named_shape(name)
    told = read_config(config(tmp_path, num_hidden_layers=known.layers, **values))
    assert (told.windowed_layers, told.window) == (known.windowed_layers, known.window)


@pytest.mark.parametrize("values", [{"hidden_size": None}, {"hidden_size": -3}, {"num_hidden_layers": "two"}])
def test_a_config_that_lacks_sizes_or_lies_is_refused(tmp_path, values):
    config(tmp_path, **values)
    with pytest.raises(RecipeError):
        named_shape(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError):
        named_shape(str(tmp_path / "config.json"))
