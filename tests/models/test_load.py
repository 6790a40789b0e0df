"""Loading: from a folder, from a GGUF file and from nothing; and what loading refuses, in words."""

import json
import os
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from families import FAMILIES
from stretto.errors import RecipeError
from stretto.models import gguf_reading
from stretto.models.converted import keeping
from stretto.models.load import choose_device, describe, load, plain_copy
from stretto.models.logprob_head import chunk_logits
from stretto.models.reward_policy import load_reward_policy
from stretto.models.scalar_head import base_network, load_scorer
from stretto.models.scratch import character_tokenizer, configuration, fresh_network
from stretto.models.source import ModelFiles, locate
from stretto.models.value_model import load_value_model
from stretto.recipe.schema import Adapter, ModelSection, Scratch
from stretto.training.packing import pack
from tiny import CHARACTERS, CPU, SCRATCH_FILES, VOCABULARY, sample, scratch_model, scratch_policy

TOKENS = [1, 6, 7, 2, 8, 9, 0]


def plain_logits(network):
    with torch.no_grad():
        return network(input_ids=torch.tensor([TOKENS])).logits[0]


def own_logits(policy):
    batch = pack([sample(TOKENS, [1])], device=policy.device, dtype=torch.float32)
    with torch.no_grad():
        return chunk_logits(policy.hidden(batch.tokens, batch.positions, batch.layout), policy.head(), 1.0)


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def folder_of(network, path):
    network.save_pretrained(path)
    character_tokenizer(CHARACTERS).save_pretrained(path)
    return locate(str(path), path)


def section(dtype="float32", adapter=None):
    return ModelSection(name="given by its files", dtype=dtype, adapter=adapter)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_gives_the_logits_of_its_model(tmp_path, tied, dtype):
    network = llama(tie_word_embeddings=tied)
    policy = load(section(dtype), folder_of(network, tmp_path), seed=0, device=CPU)
    assert policy.dtype == getattr(torch, dtype)
    assert policy.portable
    exact = dtype == "float32"
    torch.testing.assert_close(
        own_logits(policy), plain_logits(network), rtol=1e-4 if exact else 0.1, atol=1e-5 if exact else 0.05
    )


def floating_buffers(network):
    return {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()}


def refuse_rounded(network, fresh):
    """Every floating buffer has the type and the numbers that the fresh module has."""
    expected = floating_buffers(fresh)
    found = {name.replace("base_model.model.", ""): buffer for name, buffer in floating_buffers(network).items()}
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype, name
        assert torch.equal(found[name], buffer), name


def fresh_family(family):
    """A random model; buffers that its files hold have numbers that bf16 would round."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(FAMILIES[family]())
    held = network.state_dict()
    with torch.no_grad():
        for name, buffer in floating_buffers(network).items():
            if name in held:
                buffer.normal_()
    return network


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loading_keeps_floating_buffers_exact_in_every_type(tmp_path, family, dtype):
    network = fresh_family(family)
    policy = load(section(dtype), folder_of(network, tmp_path), seed=0, device=CPU)
    refuse_rounded(policy.network, network)
    assert {weight.dtype for weight in policy.network.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_loading_keeps_scaled_rotary_frequencies_exact(tmp_path, rope):
    numbers = {"rope_type": rope, "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    network = llama(rope_parameters=numbers)
    refuse_rounded(load(section("bfloat16"), folder_of(network, tmp_path), seed=0, device=CPU).network, network)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_loading_an_adapter_keeps_buffers_of_its_base_exact(tmp_path, quantize):
    network, model = llama(), ModelSection(name="given", dtype="bfloat16", adapter=Adapter(rank=2), quantize=quantize)
    refuse_rounded(load(model, folder_of(network, tmp_path), seed=0, device=CPU).network, network)


def test_loading_keeps_buffers_exact_where_tensors_are_kept_elsewhere(tmp_path):
    network, kept = llama(), []
    with keeping(lambda tensor: kept.append(tensor.dtype) or tensor.clone()):
        policy = load(section("bfloat16"), folder_of(network, tmp_path), seed=0, device=CPU)
    refuse_rounded(policy.network, network)
    assert torch.bfloat16 in kept


def test_critics_and_reward_models_have_exact_buffers(tmp_path):
    network = llama()
    files, model = folder_of(network, tmp_path), section("bfloat16")
    base = base_network(model, files, seed=0, device=CPU, base=None)
    critic = load_value_model(
        SCRATCH_FILES, base=base, adapter=None, shared=None, dtype=torch.bfloat16, device=CPU, seed=0
    )
    refuse_rounded(critic.network, network)
    scorer = load_scorer("reward", SCRATCH_FILES, base=base, dtype=torch.bfloat16, device=CPU, seed=0, token_budget=60)
    refuse_rounded(scorer.network, network)
    refuse_rounded(load_reward_policy(model, files, seed=0, device=CPU).network, network)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logprobs_far_into_a_context_are_those_of_transformers(tmp_path, dtype):
    """A policy and the stock model in the same type are nearer to each other than the stock model is to fp32."""
    network = llama(num_attention_heads=2, max_position_embeddings=4096)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() > 1:
                weight.mul_(16 if "q_proj" in name or "k_proj" in name else 8)
    policy = load(section(dtype), folder_of(network, tmp_path), seed=0, device=CPU)
    tokens = torch.randint(5, VOCABULARY, (2300,))
    batch = pack([sample(tokens.tolist(), [1])], device=CPU, dtype=torch.float32)
    with torch.no_grad():
        own = chunk_logits(policy.hidden(batch.tokens, batch.positions, batch.layout), policy.head(), 1.0)
        stock, exact = (
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=each)(input_ids=tokens[None]).logits[0]
            for each in (getattr(torch, dtype), torch.float32)
        )
    mine, theirs, exact = (logits[2000:2300].float().log_softmax(-1) for logits in (own, stock, exact))
    assert (mine - theirs).abs().mean() < (theirs - exact).abs().mean()


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "the same number")]
)
def test_weights_that_say_nothing_are_refused_as_such_and_not_as_a_family(tmp_path, value, said):
    network = llama()
    with torch.no_grad():
        for weight in network.parameters():
            weight.fill_(value)
    with pytest.raises(RecipeError) as caught:
        load(section(), folder_of(network, tmp_path), seed=0, device=CPU)
    (problem,) = caught.value.problems
    assert problem.field == "model.name" and said in problem.reason and "family" not in str(caught.value)


def test_a_loaded_model_knows_its_context_and_what_ends_a_turn(tmp_path):
    network = llama()
    network.generation_config.eos_token_id = [3, 4]
    policy = load(section(), folder_of(network, tmp_path), seed=0, device=CPU)
    assert policy.context == 64
    assert policy.stop_tokens == {0, 3, 4}
    assert policy.device == CPU


def test_a_loaded_model_has_no_dropout_left_in_it(tmp_path):
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=0)
    assert config.resid_pdrop > 0
    policy = load(section(), folder_of(GPT2LMHeadModel(config), tmp_path), seed=0, device=CPU)
    assert policy.network.training
    assert torch.equal(own_logits(policy), own_logits(policy))


def test_a_scratch_model_depends_on_its_seed_alone_and_leaves_the_global_random_state(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, again, other = scratch_policy(seed=1), scratch_policy(seed=1), scratch_policy(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(own_logits(one), own_logits(again))
    assert not torch.equal(own_logits(one), own_logits(other))


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2)])
def test_a_scratch_model_read_back_from_its_run_is_the_one_that_was_written(tmp_path, adapter):
    written = scratch_policy(dtype="float64", seed=3)
    written.save(tmp_path / "base")
    model = scratch_model(dtype="float64", adapter=adapter)
    found = load(model, SCRATCH_FILES, seed=99, device=CPU, base=tmp_path / "base")
    assert torch.equal(own_logits(found), own_logits(written))
    assert not found.portable
    assert (found.adapted is None) == (adapter is None)


def test_a_scratch_width_must_be_a_multiple_of_its_heads():
    with pytest.raises(RecipeError) as caught:
        configuration(Scratch(width=30, heads=4))
    assert caught.value.problems[0].field == "model.scratch.width"


def test_a_scratch_model_is_a_stock_llama_apart_from_its_norms():
    network = fresh_network(Scratch(width=32, heads=2, characters="ab"), seed=0)
    assert type(network) is LlamaForCausalLM
    assert network.config.vocab_size == 7


@pytest.mark.parametrize("characters", ["ab", "0123456789+= \n", "äöü😀", "<|>"])
def test_a_character_tokenizer_gives_one_token_per_character_and_takes_it_back(characters):
    tokenizer = character_tokenizer(characters)
    text = characters * 2
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("~")) == "<|unknown|>"


def test_what_is_no_model_is_refused_in_words(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RecipeError) as caught:
        load(section(), locate(str(tmp_path), tmp_path), seed=0, device=CPU)
    assert caught.value.problems[0].field == "model.name"
    assert "\n" not in caught.value.problems[0].reason


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other sizes"])
def test_damaged_weights_are_refused_in_words(tmp_path, damage):
    files = folder_of(llama(), tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "noise":
        weights.write_bytes(b"\x80\x04\x95" * 1000)
    else:
        LlamaForCausalLM(LlamaConfig(**(llama().config.to_dict() | {"hidden_size": 64}))).save_pretrained(
            tmp_path / "x"
        )
        weights.write_bytes((tmp_path / "x" / "model.safetensors").read_bytes())
    with pytest.raises(RecipeError) as caught:
        load(section(), files, seed=0, device=CPU)
    assert caught.value.problems[0].field == "model.name"


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[1", f"{INDEX} is not a JSON document"),
        ("[1]", f"{INDEX} has no `weight_map`"),
        ('{"metadata": {}, "weight_map": {}}', f"{INDEX} has no `weight_map`"),
        ('{"metadata": {}, "weight_map": {"a": 3}}', f"{INDEX} has no `weight_map`"),
        ('{"weight_map": {"a": "part.safetensors"}}', f"{INDEX} has no section `metadata`"),
        ('{"metadata": {}, "weight_map": {"a": "absent.safetensors"}}', "'absent.safetensors' is listed in"),
        ('{"metadata": {}, "weight_map": {"a": "../part.safetensors"}}', "'../part.safetensors' is listed in"),
        ('{"metadata": {}, "weight_map": {"a": "part.safetensors"}}', "part.safetensors is truncated"),
        ('{"metadata": {}, "weight_map": {"a": "noise.safetensors"}}', "noise.safetensors has no valid safetensors"),
    ],
)
def test_describe_names_the_damaged_file_of_a_sharded_model(tmp_path, index, words):
    files = folder_of(llama(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "part.safetensors").write_bytes(weights[:-100])
    (tmp_path / "noise.safetensors").write_bytes(b"\x80\x04\x95" * 1000)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text(index, "utf-8")
    with pytest.raises(RecipeError, match=re.escape(words)):
        describe(files)


def test_load_rejects_a_pickle_with_objects_and_names_safetensors(tmp_path):
    files = folder_of(llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": tmp_path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(RecipeError, match="unpickles tensors alone") as caught:
        load(section(), files, seed=0, device=CPU)
    assert "safetensors" in caught.value.problems[0].fix and "weights_only" not in str(caught.value)


def test_a_model_that_lacks_weights_is_refused_rather_than_filled_with_noise(tmp_path):
    files = folder_of(llama(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(section(), files, seed=0, device=CPU)


def test_the_cpu_is_taken_where_the_recipe_asks_for_it():
    assert choose_device("1xcpu") == CPU


def interleaved(weight, heads):
    """Rows in the order in which GGUF files keep the rotated halves of each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(network, path):
    """A llama in a GGUF file, in fp32, with a byte-level vocabulary and a chat template."""
    config = network.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", *"abcdefghijklmn", "ab"])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * 15])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, weight in network.named_parameters():
        data = weight.detach().numpy().astype(np.float32)
        if "q_proj" in name:
            data = interleaved(data, config.num_attention_heads)
        if "k_proj" in name:
            data = interleaved(data, config.num_key_value_heads)
        stem = name.removesuffix(".weight")
        layer, _, leaf = stem.removeprefix("model.layers.").partition(".")
        writer.add_tensor(f"blk.{layer}.{names[leaf]}.weight" if leaf in names else f"{names[stem]}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory):
    """A network, and the GGUF file that holds it."""
    network = llama(tie_word_embeddings=True, vocab_size=16)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(network, path)
    return network, path


def test_a_gguf_file_gives_the_logits_of_the_model_in_it(gguf_model):
    network, path = gguf_model
    policy = load(section(), locate(str(path), path.parent), seed=0, device=CPU)
    torch.testing.assert_close(own_logits(policy), plain_logits(network), rtol=1e-4, atol=1e-5)
    assert not policy.portable
    assert policy.tokenizer.encode("abcab") == [15, 3, 15]
    assert policy.tokenizer.chat_template is not None
    assert policy.stop_tokens == {0}


def test_a_model_from_a_gguf_file_can_be_saved_and_loaded_by_transformers(gguf_model, tmp_path):
    network, path = gguf_model
    policy = load(section(), locate(str(path), path.parent), seed=0, device=CPU)
    policy.save(tmp_path)
    torch.testing.assert_close(
        plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), plain_logits(network), rtol=1e-5, atol=1e-6
    )


def test_a_gguf_file_keeps_rotary_frequencies_exact(gguf_model):
    network, path = gguf_model
    refuse_rounded(load(section("bfloat16"), locate(str(path), path.parent), seed=0, device=CPU).network, network)


def test_an_adapter_over_a_gguf_file_trains_the_adapter_alone(gguf_model):
    _, path = gguf_model
    policy = load(section(adapter=Adapter(rank=2)), locate(str(path), path.parent), seed=0, device=CPU)
    assert all("lora_" in name for name in policy.trained())
    assert policy.adapted is not None


def test_a_cut_gguf_file_is_refused_in_words(gguf_model, tmp_path):
    _, path = gguf_model
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(RecipeError) as caught:
        load(section(), locate(str(cut), Path(tmp_path)), seed=0, device=CPU)
    assert caught.value.problems[0].field == "model.name"


def test_a_plain_copy_has_the_weights_and_buffers_and_no_mark_of_where_they_came_from():
    network = llama()
    network.config.quantization_config = {"quant_method": "gguf"}
    copied = plain_copy(network)
    assert getattr(copied.config, "quantization_config", None) is None
    assert {weight.device.type for weight in (*copied.parameters(), *copied.buffers())} == {"cpu"}
    assert copied.get_output_embeddings().weight.data_ptr() == network.get_output_embeddings().weight.data_ptr()
    torch.testing.assert_close(plain_logits(copied), plain_logits(network), rtol=0, atol=0)


def test_a_hub_model_that_is_not_here_is_refused_without_the_network():
    files = ModelFiles(kind="hub", name="nobody/nothing", folder=None, file=None)
    with pytest.raises(RecipeError) as caught:
        load(section(), files, seed=0, device=CPU)
    assert "nobody/nothing" in caught.value.problems[0].reason


def test_a_gguf_file_is_read_once_for_all_its_parts(gguf_model, monkeypatch):
    _, path = gguf_model
    opened, names = [], []
    reader, table = gguf_reading.READER, gguf_reading.NAMES
    monkeypatch.setattr(gguf_reading, "READER", lambda path: opened.append(path) or reader(path))
    monkeypatch.setattr(gguf_reading, "NAMES", lambda *what: names.append(what) or table(*what))
    monkeypatch.setattr(gguf, "GGUFReader", reader)  # what a reading puts back is the counting ones
    monkeypatch.setattr(gguf, "get_tensor_name_map", table)
    os.utime(path, ns=(1, len(opened) + 1))  # as if nobody had looked at it before
    files = ModelFiles(kind="gguf", name=str(path), folder=path.parent, file=path.name)
    describe(files)
    load(ModelSection(name=str(path), adapter=None), files, seed=0, device=torch.device("cpu"))
    assert len(opened) == len(names) == 1
    assert gguf.GGUFReader is gguf_reading.READER
    os.utime(path, ns=(2, 2))  # another file in its place is read anew
    describe(files)
    assert len(opened) == 2


def test_a_gguf_file_is_loaded_without_a_word_on_the_screen(gguf_model, capfd):
    _, path = gguf_model
    load(section(), locate(str(path), path.parent), seed=0, device=CPU)
    assert capfd.readouterr() == ("", "")


def test_a_gguf_file_is_described_once_until_it_changes_and_to_everyone_apart(gguf_model, tmp_path, monkeypatch):
    _, original = gguf_model
    path = tmp_path / "tiny.gguf"
    shutil.copy(original, path)
    readings = []
    reader = gguf.GGUFReader.__init__

    def counted(self, *given, **named):
        readings.append(given)
        reader(self, *given, **named)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    config, tokenizer = describe(locate(str(path), path.parent))
    first = len(readings)
    assert first > 0
    config.hidden_size, tokenizer.chat_template = 1, "changed"
    again, same = describe(locate(str(path), path.parent))
    assert len(readings) == first
    assert (again.hidden_size, same.chat_template) != (1, "changed")
    assert again.hidden_size == 32
    assert same.encode("abc") == tokenizer.encode("abc")
    os.utime(path, (1, 1))
    describe(locate(str(path), path.parent))
    assert len(readings) == 2 * first


def test_files_with_blocks_of_fp8_are_read_as_bfloat16(tmp_path):
    network = llama(hidden_size=256, intermediate_size=128).to(torch.bfloat16)
    files = folder_of(network, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    expected = dict(weights)
    for name in [name for name in weights if "_proj" in name]:
        whole = weights[name].float()
        parts = whole.unflatten(0, (-1, min(128, len(whole)))).unflatten(2, (-1, 128))
        scales = parts.abs().amax((1, 3)) / 448
        narrow = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        wide = narrow.float() * scales[:, None, :, None]
        weights[name] = narrow.flatten(2).flatten(0, 1)
        weights[f"{name}_scale_inv"] = scales
        expected[name] = wide.flatten(2).flatten(0, 1).to(torch.bfloat16)
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((tmp_path / "m" / "config.json").read_text()) | {"quantization_config": blocks}
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings))
    policy = load(ModelSection(name=str(tmp_path / "m"), adapter=Adapter(rank=2)), files, seed=0, device=CPU)
    read = {name.replace(".base_layer", ""): tensor for name, tensor in policy.network.named_parameters()}
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items() if name != "lm_head.weight")
    assert describe(files)[0].quantization_config["dequantize"]  # on GPUs transformers would compute in FP8 by itself
    load(ModelSection(name=str(tmp_path / "m"), adapter=None), files, seed=0, device=CPU).save(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
