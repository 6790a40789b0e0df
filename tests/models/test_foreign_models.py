"""A model's files come from strangers: none of its code runs, and whatever is wrong with them is told as that."""

import ast
import io
import json
import re
import shutil
import struct
from pathlib import Path

import gguf
import pytest
import torch
import yaml

from running import data_with
from stretto.api.recipes import PROBES
from stretto.checks.deep import deep_problems
from stretto.checks.recipe import examine
from stretto.cli.main import main
from stretto.environments.templates import shared
from stretto.errors import RecipeError
from stretto.models.load import load
from stretto.models.scalar_head import load_scorer
from stretto.models.scratch import character_tokenizer, fresh_network
from stretto.models.source import locate
from stretto.recipe.load import load_recipe
from stretto.recipe.schema import Scratch

SOURCE = Path(__file__).parents[2] / "src" / "stretto"
CHARACTERS = "01= abcdefghijklmnopqrstuvwxyzW?,."


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A tiny model that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("sound") / "model"
    scratch = Scratch(layers=1, width=16, heads=2, characters=CHARACTERS, context=64)
    fresh_network(scratch, seed=0).save_pretrained(folder)
    character_tokenizer(scratch.characters).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    """A copy of it, beside a recipe that names it."""
    shutil.copytree(sound, tmp_path / "model")
    write_recipe(tmp_path)
    return tmp_path


def write_recipe(folder, name="model", **changes):
    model = {"name": name, "dtype": "float32", "adapter": {"kind": "lora", "rank": 2, "alpha": 4.0}}
    (folder / "r.yaml").write_text(yaml.safe_dump(data_with(model=model, **changes)))


def change(folder, file, **values):
    """Changes a JSON file of the model; GONE takes a key out."""
    path = folder / "model" / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= values
    path.write_text(json.dumps({key: value for key, value in settings.items() if value != "GONE"}))


def problems(folder):
    """What both tiers of the check find."""
    recipe, found = examine(folder / "r.yaml", root=folder, probes=PROBES)
    return list(found) or deep_problems(recipe, folder)


def refused(folder):
    found = problems(folder)
    assert found
    for problem in found:
        assert problem.field == "model.name"
        assert problem.fix
        assert 10 < len(problem.reason) < 600
    return found[0].reason


# Code of a model ---------------------------------------------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "house"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def coded(folder, monkeypatch):
    """The model with Python of its own, and a user who says yes to everything; the file that the code would leave."""
    mark = folder / "ran"
    (folder / "model" / "house.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
    yield mark
    assert not mark.exists()


AUTO = {
    "AutoConfig": "house.Config",
    "AutoModelForCausalLM": "house.Model",
    "AutoModelForSequenceClassification": "house.Model",
}


def test_a_model_that_needs_its_own_code_is_refused_in_words(folder, coded, capsys):
    change(folder, "config.json", model_type="house", auto_map=AUTO)
    assert "needs Python code of its own repository, and stretto runs no code of models" in refused(folder)
    assert main(["check", str(folder / "r.yaml"), "--deep"]) == 2
    told = capsys.readouterr()
    assert "name a model of a family that transformers knows by itself" in told.err
    assert "trust_remote_code" not in told.err + told.out
    assert "[y/N]" not in told.err + told.out


def test_a_tokenizer_that_needs_its_own_code_runs_none(folder, coded):
    change(
        folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "house.Tokens"]}, tokenizer_class="Tokens"
    )
    problems(folder)


@pytest.mark.parametrize("reference", ["house.Model", "somebody/elsewhere--house.Model"])
def test_code_beside_a_known_family_is_passed_over(folder, coded, reference):
    change(folder, "config.json", auto_map=dict.fromkeys(AUTO, reference))
    assert problems(folder) == []
    recipe, _ = examine(folder / "r.yaml", root=folder, probes=PROBES)
    load(recipe.model, locate("model", folder), seed=0, device=torch.device("cpu"))


def test_a_reward_model_runs_no_code_either(folder, coded):
    change(folder, "config.json", model_type="house", auto_map=AUTO, architectures=["HouseForSequenceClassification"])
    common = {"base": None, "dtype": torch.float32, "device": torch.device("cpu"), "seed": 0, "token_budget": 64}
    with pytest.raises(RecipeError, match="needs Python code of its own repository") as caught:
        load_scorer("reward", locate("model", folder), **common)
    assert caught.value.problems[0].field == "roles.reward_model.name"


def test_kernels_of_a_repository_are_not_fetched(folder):
    change(folder, "config.json", attn_implementation="somebody/attention")
    assert "stretto runs no code of models" in refused(folder)


LOADERS = ("from_pretrained", "from_config", "load_dataset")


@pytest.mark.parametrize(
    "file", [path for path in SOURCE.rglob("*.py") if any(name in path.read_text() for name in LOADERS)]
)
def test_every_loader_is_told_to_run_no_code(file):
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in LOADERS and "Peft" not in ast.unparse(call.func):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("trust_remote_code") == "False", f"{file}:{call.lineno}"


# Files that are wrong ----------------------------------------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": {}}, "num_hidden_layers is {}"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": -2}, "num_attention_heads is -2"),
        ({"num_attention_heads": 3}, ""),
        ({"num_attention_heads": None}, ""),
        ({"num_key_value_heads": [0]}, "num_key_value_heads is 0"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000"),
        ({"hidden_size": None}, ""),
        ({"hidden_size": []}, ""),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": 3}, "prompts have tokens of its tokenizer that it has no embedding for (it has 3)"),
        ({"intermediate_size": "64"}, "intermediate_size is '64'"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many'"),
        ({"max_position_embeddings": NAN}, "max_position_embeddings is nan"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan, which is no number"),
        ({"rms_norm_eps": "small"}, ""),
        ({"rope_theta": INFINITE}, "rope_theta is inf"),
        ({"dtype": "float99"}, "dtype is 'float99', which is no type of weights"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"eos_token_id": [[0]]}, "eos_token_id is [[0]], and should be the number of a token"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
        ({"eos_token_id": "<|end|>"}, "eos_token_id is '<|end|>'"),
        ({"pad_token_id": [1, 2]}, "pad_token_id is [1, 2]"),
        ({"bos_token_id": 10**12}, "bos_token_id is 1000000000000"),
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"model_type": "GONE"}, "names no model_type"),
        ({"model_type": ["llama"]}, "names no model_type"),
        ({"hidden_act": "magic"}, "magic"),
        ({"hidden_act": 3}, ""),
        ({"rope_parameters": {"rope_type": "magic"}}, "magic"),
        ({"rope_parameters": 7}, ""),
        ({"layer_types": ["full_attention"] * 7}, ""),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_is_told(folder, values, said):
    change(folder, "config.json", **values)
    assert said in refused(folder)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("generation_config.json", {"eos_token_id": [[0]]}, "the generation_config.json of model cannot be right: eos"),
        ("generation_config.json", {"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ("generation_config.json", {"pad_token_id": -5}, "pad_token_id is -5"),
        ("tokenizer_config.json", {"model_max_length": "long"}, ""),
        ("tokenizer_config.json", {"model_max_length": [1]}, ""),
        ("tokenizer_config.json", {"eos_token": {"a": 1}}, ""),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}, ""),
    ],
    ids=str,
)
def test_other_settings_that_are_wrong_are_told(folder, file, values, said):
    change(folder, file, **values)
    assert said in refused(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b"{", b"\xff\xfe{}", b"\0" * 100, b'{"a": ' * 5000, b"7"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_that_is_no_json_object_is_told(folder, file, content):
    (folder / "model" / file).write_bytes(content)
    refused(folder)


@pytest.mark.parametrize(
    "template",
    ["{% for", "{{ messages[5].content }}", 7, {"a": "x", "b": "y"}, [{"name": "a"}], "{{ raise_exception('no') }}"],
    ids=str,
)
def test_a_chat_template_that_is_wrong_is_told(folder, template):
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    change(folder, "tokenizer_config.json", chat_template=template)
    found = problems(folder)
    assert [problem.field in ("task", "model.name") for problem in found] == [True]


def test_a_chat_template_that_never_ends_is_told_in_time(folder, capsys, monkeypatch):
    (folder / "model" / "chat_template.jinja").write_text("{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4)
    list(shared().texts("{{ 1 }}", {}, ["[[], true, []]"]))  # so that only the template is waited for
    monkeypatch.setattr(shared(), "seconds", 0.2)
    assert main(["check", str(folder / "r.yaml"), "--deep", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["field"] == "model.name"
    assert problem["reason"].startswith("the chat template takes longer than 0.2 s, for prompt ")
    shared()._late = 0


def test_a_chat_template_that_writes_too_much_is_told(folder):
    (folder / "model" / "chat_template.jinja").write_text("{{ 'x' * 3000000 }}")
    assert "makes a text of 3,000,000 characters, more than the 2,000,000 that are read" in refused(folder)


@pytest.mark.parametrize("cut", [0, 8, 40, -7])
def test_truncated_weights_are_refused_by_check_and_when_they_are_loaded(folder, cut):
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    words = r"model: model\.safetensors (is truncated|has no valid safetensors header)"
    assert re.search(words, refused(folder))
    with pytest.raises(RecipeError, match=words):
        load(load_recipe(folder / "r.yaml").model, locate("model", folder), seed=0, device=torch.device("cpu"))


# GGUF files --------------------------------------------------------------------------------------------------------


def gguf_file(path, **sizes):
    """The header of a small Llama, with other sizes."""
    writer = gguf.GGUFWriter(path, "llama")
    told = {"block_count": 1, "embedding_length": 16, "attention.head_count": 2, "context_length": 64} | sizes
    for key, value in told.items():
        if isinstance(value, str):
            writer.add_string(f"llama.{key}", value)
        elif value is not None:
            writer.add_uint64(f"llama.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 10**12}, "block_count is 1000000000000"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"embedding_length": 2**40}, "embedding_length is 1099511627776"),
        ({"context_length": 0}, "context_length is 0"),
        ({"context_length": "many"}, ""),
        ({"embedding_length": None}, ""),
        ({"block_count": "two"}, ""),
    ],
    ids=str,
)
def test_a_gguf_header_that_is_wrong_is_told(folder, sizes, said):
    gguf_file(folder / "m.gguf", **sizes)
    write_recipe(folder, "m.gguf")
    assert said in refused(folder)


@pytest.mark.parametrize("at", range(0, 200, 25))
def test_a_gguf_file_with_a_flipped_byte_is_read_or_told(folder, at):
    gguf_file(folder / "m.gguf")
    content = bytearray((folder / "m.gguf").read_bytes())
    content[at] ^= 0xFF
    (folder / "m.gguf").write_bytes(content[: -at or None])
    write_recipe(folder, "m.gguf")
    refused(folder)


def test_a_gguf_file_that_claims_more_than_it_has_is_told(folder):
    head = b"GGUF" + struct.pack("<IQQ", 3, 2**40, 5)
    (folder / "m.gguf").write_bytes(head + struct.pack("<Q", 2**60))
    write_recipe(folder, "m.gguf")
    refused(folder)
