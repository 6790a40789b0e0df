"""How many parameters a model has, told by its files; what cannot be read tells nothing."""

import json
import struct

import pytest

from stretto.models.gguf_header import count_parameters
from stretto.models.size import parameters


def text(word):
    return struct.pack("<Q", len(word)) + word.encode()


def gguf(tensors, *, count=None):
    """A GGUF file of two keys, one of them a vocabulary, and of these shapes."""
    keys = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    keys += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    infos = b"".join(
        text(f"t{index}") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 3, 0)
        for index, shape in enumerate(tensors)
    )
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count is None else count, 2) + keys + infos


def test_a_gguf_file_lists_the_shapes_of_its_tensors(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([(8, 4), (8,), (2, 3, 5)]))
    assert count_parameters(path) == parameters("m.gguf", tmp_path) == 32 + 8 + 30


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        gguf([(8, 4)])[:-20],
        gguf([(8, 4)], count=2),
        gguf([(8, 4)], count=2**60),
        gguf([(1,) * 9]),
        b"\x00" * 100,
    ],
)
def test_a_broken_gguf_file_tells_nothing(tmp_path, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="it "):
        count_parameters(path)
    assert parameters("m.gguf", tmp_path) is None


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"dtype": "bfloat16"}, 500),
        ({"torch_dtype": "float32"}, 250),
        ({"dtype": "bfloat16", "quantization_config": {"bits": 4}}, None),
        ({"dtype": "mystery"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_a_folder_is_as_large_as_its_safetensors(tmp_path, config, size):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(600))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(400))
    (tmp_path / "optimizer.safetensors").write_bytes(bytes(4000))
    assert parameters(str(tmp_path), tmp_path) == size


def test_what_is_not_there_has_no_size(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    assert parameters(str(tmp_path), tmp_path) is None
    assert parameters("scratch", tmp_path) is None
    assert parameters("nobody/nothing", tmp_path) is None
    assert parameters("no such thing", tmp_path) is None
