"""Processes of a host that load one model share what loading makes of it, and keep no more than their parts."""

import subprocess
import sys

import pytest
import torch
from torch import multiprocessing, nn

from loaded import CASES, KINDS, LORA, SIZES, in_parts, write_model
from stretto.models.converted import keeping, settle
from stretto.models.load import load
from stretto.models.source import locate
from stretto.recipe.schema import ModelSection
from stretto.weights.tensors import same_bits
from stretto.workers.mapped_weights import PREFIX, USERS, MappedWeights, loading
from tiny import CPU

TABLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def files_in(folder):
    """What tensors are in, wherever below a folder."""
    return sorted(path.name for path in folder.glob(f"{PREFIX}*/*-*"))


def is_mapped(tensor):
    return not tensor.untyped_storage().resizable()


@pytest.fixture
def mapped(tmp_path):
    found = MappedWeights("one", below=tmp_path, smallest=0)
    yield found
    found.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_what_is_kept_has_the_same_bits_in_a_file(mapped, dtype):
    made = TABLE.to(dtype)
    kept = mapped.keep(made)
    assert is_mapped(kept) and not is_mapped(made)
    assert same_bits(kept, made) and kept.shape == made.shape
    assert same_bits(mapped.keep(made.t()), made.t().contiguous()), "in whatever order it lies"
    assert mapped.keep(kept) is not made and mapped.keep(kept).data_ptr() == kept.data_ptr()


def test_whoever_makes_the_same_reads_the_same_file_and_writes_to_none(mapped, tmp_path):
    other = MappedWeights("one", below=tmp_path, smallest=0)
    first, second = mapped.keep(TABLE), other.keep(TABLE.clone())
    assert len(files_in(tmp_path)) == 1
    first.fill_(7)
    assert torch.equal(second, TABLE) and torch.equal(other.keep(TABLE), TABLE)
    other.close()


def test_files_are_there_until_the_last_one_has_loaded_and_what_was_mapped_stays(mapped, tmp_path):
    other = MappedWeights("one", below=tmp_path, smallest=0)
    kept = mapped.keep(TABLE)
    mapped.close()
    assert len(files_in(tmp_path)) == 1
    other.close()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(kept, TABLE)
    assert mapped.keep(TABLE).data_ptr() == TABLE.data_ptr(), "it is over"


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path):
    script = f"""
import os, pathlib, torch
from stretto.workers.mapped_weights import MappedWeights
MappedWeights("killed", below=pathlib.Path({str(tmp_path)!r}), smallest=0).keep(torch.ones(9))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (tmp_path / f"{PREFIX}killed" / USERS).exists()
    MappedWeights("next", below=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_small_stays_in_memory(tmp_path):
    mapped = MappedWeights("one", below=tmp_path, smallest=TABLE.nbytes + 1)
    assert mapped.keep(TABLE).data_ptr() == TABLE.data_ptr()
    mapped.close()


def test_a_host_without_room_is_told_once_and_keeps_weights_in_memory(mapped):
    for path in mapped.folder.iterdir():
        path.unlink()
    mapped.folder.rmdir()
    with pytest.warns(UserWarning, match="weights stay in the memory of each process"):
        assert mapped.keep(TABLE).data_ptr() == TABLE.data_ptr()
    assert mapped.keep(TABLE).data_ptr() == TABLE.data_ptr()


def test_a_file_with_other_bits_than_its_name_says_is_not_believed(mapped, tmp_path):
    mapped.keep(TABLE)
    (path,) = tmp_path.glob(f"{PREFIX}*/*-*")
    path.write_bytes(bytes(TABLE.nbytes))
    assert mapped.keep(TABLE).data_ptr() == TABLE.data_ptr()


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_model_is_loaded_to_the_same_bits(mapped, tmp_path, quantize):
    """A mixture in another type: its files have each expert by itself."""
    name = str(write_model(tmp_path, "mixture", "small"))
    adapter = None if quantize == "none" else LORA.model_copy(update={"targets": "attention"})
    section = ModelSection(name=name, dtype="float32", quantize=quantize, adapter=adapter)
    files = locate(name, tmp_path)
    plain = load(section, files, seed=0, device=CPU)
    with keeping(mapped.keep):
        found = load(section, files, seed=0, device=CPU)
    weights = dict(found.network.named_parameters())
    for name, weight in plain.network.named_parameters():
        assert same_bits(weights[name], weight), name
        assert is_mapped(weights[name]) or "lora_" in name, name
        assert weights[name].requires_grad == weight.requires_grad
    assert any("experts" in name for name in weights)


def test_settle_maps_weights_only_while_a_keeper_is_set(mapped):
    layer = nn.Linear(3, 4)
    weight = layer.weight.data_ptr()
    assert settle(layer).weight.data_ptr() == weight and layer.weight.dtype == torch.float32
    with keeping(mapped.keep):
        assert is_mapped(settle(layer, torch.bfloat16).weight) and layer.weight.dtype == torch.bfloat16
    layer = settle(nn.Linear(3, 4), torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16 and not is_mapped(layer.weight)


def test_loading_that_fails_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ValueError, match="broken"), loading("one") as mapped:
        assert mapped.folder.parent == tmp_path
        raise ValueError("broken")
    assert list(tmp_path.iterdir()) == []
    with loading(None) as nothing:
        assert nothing is None


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What two processes have kept and needed, by case and by how they loaded."""
    folder = tmp_path_factory.mktemp("parts")
    for kind in KINDS:
        for size in SIZES:
            write_model(folder, kind, size)
    multiprocessing.start_processes(in_parts, (folder, 2, list(CASES)), nprocs=2, start_method="spawn")
    assert not list(folder.glob(f"{PREFIX}*"))
    return folder


BOUND = 1.3
"""Memory that loading may need for each byte that is kept."""

MAKES = {"slices, of another type", "slices, int8", "slices, mixture", "experts", "lane, mixture"}
"""Where files do not have what is needed, so that a process that shares nothing has all of it in its memory."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_process_needs_no_more_memory_to_load_than_for_what_it_keeps(parts, case):
    for rank in range(2):
        mapped, plain = (torch.load(parts / f"{case}-{how}-{rank}.pt") for how in ("mapped", "plain"))
        print(case, rank, *(f"{each['kept']:.0f} MB kept, {each['peak']:.0f} MB at most;" for each in (mapped, plain)))
        assert mapped["sums"] == plain["sums"] and len(mapped["sums"]) > 40
        assert 50 < mapped["kept"] < 300
        assert mapped["peak"] < BOUND * mapped["kept"]
        if case in MAKES:
            assert plain["peak"] > 1.5 * plain["kept"]
