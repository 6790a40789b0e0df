"""A GGUF file that is read back says what the run says; what could not be read back is not written."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from exported import ADAPTER, as_base_model, lora_run, model_in, run_of, tokenizer_of, trained
from stretto.api import exports as api
from stretto.cli.main import main
from stretto.environments.render import Renderer
from stretto.errors import ExportError, RecipeError
from stretto.export import gguf_file, weights
from stretto.export.gguf_file import GgufLayout, export
from stretto.export.gguf_tokenizer import split_rule, vocabulary_of
from stretto.export.proof import ask_run, prove
from stretto.models.gguf_header import read_ends

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": (LlamaConfig(**SIZES, tie_word_embeddings=True), "smollm"),
    "llama-3": (LlamaConfig(**SIZES, tie_word_embeddings=False), "llama-bpe"),
    "qwen2": (Qwen2Config(**SIZES), "qwen2"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=128), "qwen2"),
}


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "llama"]


@pytest.fixture(scope="module", params=["llama", *OTHERS])
def run(request, tmp_path_factory):
    """A run with an adapter on a model of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    config, kind = FAMILIES[request.param]
    return run_of(folder, model_in(folder / "model", config, kind=kind), model__adapter=ADAPTER)


def test_a_file_without_loss_answers_as_the_run_and_names_its_tokenizer(run):
    made = api.export_gguf(run, prompts=6)
    assert made.kind == "f32" and made.proof.equal == made.proof.prompts > 0
    assert made.proof.logprob_max < 1e-3 and made.proof.unexplained < 1e-3
    assert made.path == run / "gguf" / "step-000002-f32.gguf" and made.size == made.path.stat().st_size
    fields = gguf.GGUFReader(made.path).fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert "<|im_start|>" in fields["tokenizer.chat_template"].contents()
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 1
    assert [path.name for path in made.path.parent.iterdir()] == [made.path.name], "no draft is left"


def test_the_command_tells_of_a_file_or_keeps_none(run, tmp_path, capsys, monkeypatch):
    made = ["export", str(run), "--gguf", "--prompts", "1", "--to"]
    assert main([*made, str(tmp_path / "one.gguf"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["file", "type", "bytes", "step", "proof"] and document["type"] == "f32"
    assert document["bytes"] == (tmp_path / "one.gguf").stat().st_size
    assert main([*made, str(tmp_path / "two.gguf"), "--quantise", "bf16"]) == 0
    model, proof = capsys.readouterr().out.splitlines()
    assert model.startswith(f"model   {tmp_path / 'two.gguf'}  (bf16, ") and proof.startswith("proof   ")
    right = weights.adapter_updates

    def another(*given):
        return {name: replace(update, up=torch.ones_like(update.up)) for name, update in right(*given).items()}

    monkeypatch.setattr(weights, "adapter_updates", another)
    assert main([*made, str(tmp_path / "three.gguf")]) == 1
    assert "was not kept" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gguf", "two.gguf"]


def ended(asked, model, policy, ends):
    """The run's answers, as if it had ended them at once with these tokens."""
    network = AutoPeftModelForCausalLM.from_pretrained(model.checkpoint, dtype=torch.float32)
    answers = []
    for context, answer, end in zip(asked.contexts, asked.answers, ends, strict=True):
        tokens = torch.tensor([*context, end])[None]
        with torch.no_grad():
            logprob = network(input_ids=tokens[:, :-1]).logits[0, -1].log_softmax(-1)[end]
        answers.append(replace(answer, tokens=np.array([end]), logprobs=np.array([float(logprob)]), stop="stop"))
    stop = policy.stop_tokens | set(ends)
    renderer = Renderer(policy.tokenizer, stop=stop)
    texts = tuple(renderer.text(answer.tokens.tolist()) for answer in answers)
    return replace(asked, answers=tuple(answers), texts=texts, stop=stop)


def test_a_file_names_the_two_ends_that_answers_have(run, tmp_path, monkeypatch):
    model, (often, seldom) = trained(run), (30, 20)
    policy = model.load("float32")
    asked = ended(ask_run(model, policy, most=3), model, policy, [often, seldom, often])
    assert asked.stop == {1, often, seldom}
    monkeypatch.setattr(gguf_file, "ask_run", lambda *given, **told: asked)
    made = export(model, tmp_path / "two.gguf", kind="bf16", most=3, note=print)
    fields = gguf.GGUFReader(made.path).fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == often
    assert fields["tokenizer.ggml.eot_token_id"].contents() == seldom
    assert read_ends(made.path) == {often, seldom}
    monkeypatch.undo()
    made = export(model, tmp_path / "one.gguf", kind="bf16", most=3, note=print)
    assert read_ends(made.path) == {1}
    with pytest.raises(ExportError, match="answers end at the tokens"):
        prove(asked, made.path, exact=False)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
def test_the_gap_of_a_file_that_rounds_is_stated(run, tmp_path, kind):
    made = api.export_gguf(run, prompts=4, quantise=kind, to=tmp_path / "m.gguf")
    assert 0 < made.proof.logprob_mean < 0.5 and made.proof.unexplained < 1e-3
    stored = {tensor.tensor_type.name for tensor in gguf.GGUFReader(made.path).tensors}
    assert stored == {"F32", kind.upper()} | ({"Q8_0"} if kind == "q4_0" else set())
    with pytest.raises(RecipeError, match="exists already"):
        api.export_gguf(run, quantise=kind, to=tmp_path / "m.gguf")


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapter"])
def test_what_imitates_a_template_stops_at_its_end_of_turn_wherever_it_goes(adapter, tmp_path):
    """Base models name the end of a text alone. Two runs, because a checkpoint is the model itself or needs a merge."""
    config, kind = FAMILIES["llama"]
    model = model_in(tmp_path / "model", config, kind=kind)
    ends = sorted({1, as_base_model(model)})
    run = run_of(
        tmp_path, model, model__adapter=adapter, algorithm={"name": "sft"}, rewards=[], batch={"prompts": 4},
        engine={}, checkpoint={"every": 2}, evaluate={"every": 2, "prompts": 2},
    )  # fmt: skip
    folder = trained(run).checkpoint if adapter is None else api.merge(run, prompts=2).folder
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends
    fields = gguf.GGUFReader(api.export_gguf(run, prompts=2).path).fields
    assert sorted(fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot")) == ends
    session = api.chat(run)
    assert sorted(session.renderer.stop) == ends
    session.close()


class Unturned(GgufLayout):
    """Forgets that llama.cpp wants the halves of heads interleaved."""

    def _interleaved(self, name, weight):
        return weight


def test_a_file_with_rows_in_another_order_is_refused(tmp_path):
    config, kind = FAMILIES["llama"]
    run = run_of(tmp_path, model_in(tmp_path / "model", config, kind=kind), model__adapter=None)
    with pytest.raises(ExportError, match="is not the model of this run"):
        export(trained(run), tmp_path / "out" / "m.gguf", kind="f32", most=3, note=print, make=Unturned)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_the_rule_for_splitting_texts_is_found_in_the_tokenizer(kind):
    vocabulary = vocabulary_of(tokenizer_of(kind), size=320)
    assert vocabulary.rule == kind and len(vocabulary.tokens) == 320
    assert vocabulary.types[0] == gguf.TokenType.CONTROL and vocabulary.types[-1] == gguf.TokenType.UNUSED


def test_a_rule_without_a_name_is_refused():
    for described in (None, {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": True}):
        with pytest.raises(RecipeError, match="has no name in GGUF"):
            split_rule(described)


def test_families_and_positions_that_cannot_be_read_back_are_refused(tmp_path):
    gemma = GemmaConfig(**SIZES, head_dim=16)
    run = run_of(tmp_path, model_in(tmp_path / "gemma", gemma, kind="gpt-2"), model__adapter=None)
    with pytest.raises(RecipeError, match="of the family gemma as GGUF is not available yet"):
        api.export_gguf(run)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    other = run_of(tmp_path, model_in(tmp_path / "stretched", config, kind="gpt-2"), model__adapter=None)
    with pytest.raises(RecipeError, match=r"its positions \(linear RoPE\)"):
        api.export_gguf(other)


def test_a_scratch_model_has_a_tokenizer_that_gguf_cannot_say(tmp_path):
    with pytest.raises(RecipeError, match="of the kind WordLevel"):
        api.export_gguf(lora_run(tmp_path))
