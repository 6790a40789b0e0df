"""A merged model is the run's, in answers and numbers, or it is not kept."""

import json
import stat
from functools import partial

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from exported import ADAPTER, LEARNS, edited, lora_run, run_of, trained
from families import mixture_in
from running import recipe_in, start
from stretto.api import exports as api
from stretto.errors import ExportError, RecipeError
from stretto.export.merge import lost_share, merge
from stretto.export.proof import ask_run, prove
from stretto.export.weights import AdapterUpdate, TrainedWeights
from stretto.models.load import load
from stretto.models.quantised import QuantisedLinear
from stretto.models.source import locate
from tiny import CPU


def modes(folder):
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_a_merged_model_is_the_one_that_peft_would_make_and_answers_as_the_run(run, tmp_path):
    merged = api.merge(run, to=tmp_path / "merged")
    proof = merged.proof
    assert merged.dtype == "float32" and proof.equal == proof.prompts > 0 and proof.unexplained < 1e-3
    assert proof.logprob_max < 1e-3
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = AutoPeftModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000002").merge_and_unload()
    before = AutoModelForCausalLM.from_pretrained(run / "base").state_dict()
    moved = 0.0
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-6, atol=1e-6)
        moved = max(moved, float((mine[name] - before[name]).abs().max()))
    assert moved > 1e-3, "the adapter does something"
    ends = json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == sorted(trained(run).load("float32").stop_tokens)
    assert modes(tmp_path / "merged") == {0o644}
    assert [path.name for path in tmp_path.iterdir()] == ["merged"], "no draft is left"
    assert json.loads((tmp_path / "merged" / "proof.json").read_text())["proof"]["equal"] == proof.equal


class Spoiled(TrainedWeights):
    """Weights with one update that is not the adapter's."""

    def __init__(self, model, policy, plain, spoil):
        super().__init__(model, policy, plain)
        name = sorted(self.updates)[0]
        spoil(self.updates, name)


def leave_out(updates, name):
    del updates[name]


def scale(updates, name):
    updates[name] = AdapterUpdate(up=updates[name].up, down=updates[name].down, scale=updates[name].scale * 1.5)


def swap(updates, name):
    one, other = [each for each in updates if each.endswith("mlp.up_proj.weight")]
    updates[one], updates[other] = updates[other], updates[one]


class Nudged(TrainedWeights):
    """A weight that has no adapter is a little off, which no answer shows."""

    def read(self, name):
        weight = super().read(name)
        return weight * 1.01 if name == "model.norm.weight" else weight


def test_a_weight_without_an_adapter_that_is_not_the_bases_is_refused(run, tmp_path):
    with pytest.raises(ExportError, match=r"model\.norm\.weight, which no adapter changes"):
        merge(trained(run), tmp_path / "m", dtype="bfloat16", most=1, note=print, make=Nudged)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spoil", [leave_out, scale, swap])
def test_a_broken_merge_is_refused_and_not_kept(run, tmp_path, spoil, dtype):
    with pytest.raises(ExportError, match="update is missing or too much"):
        merge(trained(run), tmp_path / "m", dtype=dtype, most=3, note=print, make=partial(Spoiled, spoil=spoil))
    assert list(tmp_path.iterdir()) == []


def test_an_export_with_another_end_template_or_weights_is_told(run, tmp_path):
    folder = api.merge(run, to=tmp_path / "merged", prompts=3).folder
    model = trained(run)
    asked = ask_run(model, model.load("float32"), most=3)
    assert prove(asked, folder, exact=True).equal == 3
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    edited(folder / "generation_config.json", eos_token_id=[*ends, 3])
    with pytest.raises(ExportError, match="answers end at the tokens"):
        prove(asked, folder, exact=True)
    edited(folder / "generation_config.json", eos_token_id=ends)
    template = next(folder.glob("*.jinja"))
    text = template.read_text()
    template.write_text(text.replace("<|assistant|>", "<|user|>"))
    with pytest.raises(ExportError, match="makes other tokens of prompt"):
        prove(asked, folder, exact=True)
    template.write_text(text)
    network = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.get_output_embeddings().weight.mul_(1.01)
    network.save_pretrained(folder)
    edited(folder / "generation_config.json", eos_token_id=ends)
    with pytest.raises(ExportError, match="nothing should be lost"):
        prove(asked, folder, exact=True)


def test_what_rounding_loses_is_measured_and_decides_the_type(tmp_path):
    young = start(
        tmp_path,
        **(LEARNS | {"optimizer__lr": 1e-5}),
        model__adapter={"rank": 2, "alpha": 2.0},
        model__dtype="bfloat16",
    ).folder
    weights = TrainedWeights(trained(young), trained(young).load("float32"))
    assert lost_share(weights, torch.bfloat16) > 0.5 and lost_share(weights, torch.float32) < 0.1
    told = []
    merged = api.merge(young, prompts=2, note=told.append)
    assert merged.dtype == "float32" and merged.folder == young / "merged" / "step-000002"
    assert "float32 is written" in told[0]
    rounded = api.merge(young, prompts=2, dtype="bfloat16", to=tmp_path / "rounded", note=told.append)
    assert rounded.lost > 0.5 and "rounding to bfloat16 loses" in told[1]
    assert {t.dtype for t in load_file(tmp_path / "rounded" / "model.safetensors").values()} == {torch.bfloat16}


def test_what_cannot_be_merged_is_refused_with_what_to_do(run, tmp_path):
    whole = start(tmp_path, **LEARNS).folder
    with pytest.raises(RecipeError, match="a whole model already"):
        api.merge(whole)
    with pytest.raises(RecipeError, match="exists already"):
        api.merge(run, to=tmp_path)
    with pytest.raises(RecipeError, match="those that it holds: 1, 2"):
        api.merge(run, step="7", to=tmp_path / "m")
    with pytest.raises(RecipeError, match="is no step"):
        api.merge(run, step="last", to=tmp_path / "m")
    with pytest.raises(RecipeError, match="--plain-base: asks for the base as it is stored"):
        api.merge(run, plain_base=True, to=tmp_path / "m")
    with pytest.raises(RecipeError, match="is none of them"):
        api.merge(run, dtype="int3", to=tmp_path / "m")


def weights_in(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_model_on_few_bits_is_merged_as_the_run_read_it_or_onto_the_base_as_it_is_stored(tmp_path):
    run, told = lora_run(tmp_path, model__quantize="int8"), []
    wide = api.merge(run, prompts=3, to=tmp_path / "wide", note=told.append)
    assert wide.proof.equal == 3 and wide.proof.logprob_max < 1e-3 and wide.proof.unexplained < 1e-3
    plain = api.merge(run, prompts=3, to=tmp_path / "plain", plain_base=True, note=told.append)
    assert plain.proof.logprob_mean > 10 * wide.proof.logprob_mean and plain.proof.unexplained < 1e-3
    assert "as the run has read it in int8" in told[0] and "what int8 rounds off" in told[1]
    adapted = AutoPeftModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000002").merge_and_unload()
    for name, weight in weights_in(plain.folder).items():
        torch.testing.assert_close(weight, adapted.state_dict()[name], rtol=1e-6, atol=1e-6)
    layers = dict(trained(run).load("float32").network.named_modules())
    name = next(name for name, layer in layers.items() if isinstance(layer, QuantisedLinear))
    layer, name = layers[name.removesuffix(".base_layer")], name.removesuffix(".base_layer")
    expected = layer.base_layer.wide(torch.float32) + layer.get_delta_weight("default")
    torch.testing.assert_close(weights_in(wide.folder)[f"{name}.weight"], expected, rtol=1e-6, atol=1e-6)
    asked = ask_run(trained(run), trained(run).load("float32"), most=1)
    session = api.chat(run, temperature=0.0)
    assert session.say(asked.prompts[0].messages[-1]["content"]).text == asked.texts[0]
    session.close()
    pushed = api.push(run, to="org/tiny", dry_run=True, prompts=1)
    assert pushed.merged and "frozen in int8" in (pushed.folder / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # PEFT looks for layers of these names
def test_adapters_of_experts_are_merged_and_gone_on_with(tmp_path):
    mixture_in(tmp_path / "mixture")
    run = run_of(tmp_path, tmp_path / "mixture", model__adapter=ADAPTER)
    made = api.merge(run, prompts=3)
    assert made.proof.equal == made.proof.prompts == 3 and made.proof.unexplained < 1e-3
    checkpoint = run / "checkpoints" / "step-000002"
    adapted = AutoPeftModelForCausalLM.from_pretrained(checkpoint).merge_and_unload().state_dict()
    mine, before = weights_in(made.folder), weights_in(tmp_path / "mixture")
    for name, weight in mine.items():
        torch.testing.assert_close(weight, adapted[name], rtol=1e-6, atol=1e-6)
        assert torch.equal(weight, before[name]) != ("proj" in name), f"{name}: experts and no router have moved"
    recipe = recipe_in(tmp_path, model__name=str(checkpoint), model__scratch=None, model__adapter=ADAPTER)
    files = locate(recipe.model.name, tmp_path)
    assert files.adapter.refused(recipe.model.adapter) is None and "all-linear" in files.adapter.written
    went = dict(load(recipe.model, files, seed=9, device=CPU).network.named_parameters())
    for name, weight in trained(run).load("float32").network.named_parameters():
        assert torch.equal(weight, went[name]), name
