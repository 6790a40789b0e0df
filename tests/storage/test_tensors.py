"""The state of a part comes back from its files exactly as it went in."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import CheckpointError
from stretto.storage.tensors import read_state, write_tensors, write_values


def through_files(folder, state):
    values, tensors = folder / "part.json", folder / "part.safetensors"
    tensors.unlink(missing_ok=True)
    if found := write_values(values, state):
        write_tensors(tensors, found)
    return read_state(values, tensors)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


texts = st.text(st.characters(codec=None, exclude_categories=[]), max_size=4)
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
arrays = st.builds(lambda shape, dtype: (torch.rand(shape) * 9).to(dtype), shapes, dtypes)
nested = st.recursive(
    plain | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.integers() | st.tuples(st.integers(), texts), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(state=st.dictionaries(texts, nested, max_size=4))
def test_any_nesting_of_plain_values_and_tensors_comes_back(tmp_path_factory, state):
    assert same(state, through_files(tmp_path_factory.mktemp("state"), state))


def test_an_optimizer_state_with_numbered_parameters_comes_back(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.95))
    (weight * torch.arange(3.0)).sum().backward()
    optimizer.step()
    assert same(optimizer.state_dict(), through_files(tmp_path, optimizer.state_dict()))


def test_tensors_that_share_memory_come_back_apart(tmp_path):
    whole = torch.arange(6.0)
    found = through_files(tmp_path, {"whole": whole, "half": whole[:3], "turned": whole.view(2, 3).T})
    found["whole"].zero_()
    assert found["half"].tolist() == [0, 1, 2]
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_restored_tensor_may_be_changed_without_changing_the_file(tmp_path):
    through_files(tmp_path, {"x": torch.zeros(3)})["x"].add_(1)
    assert read_state(tmp_path / "part.json", tmp_path / "part.safetensors")["x"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [np.zeros(2), object(), b"bytes", {1, 2}])
def test_what_cannot_be_kept_is_refused_with_its_place(tmp_path, value):
    with pytest.raises(CheckpointError, match="part/deep/1: a "):
        write_values(tmp_path / "part.json", {"deep": [0, value]})


def test_other_mappings_come_back_as_dicts(tmp_path):
    assert through_files(tmp_path, OrderedDict(a=OrderedDict(b=1))) == {"a": {"b": 1}}


def test_a_tensor_that_the_file_lacks_is_an_error_that_names_the_part(tmp_path):
    values = tmp_path / "part.json"
    write_values(values, {"x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"the state of part cannot be read"):
        read_state(values, tmp_path / "part.safetensors")
