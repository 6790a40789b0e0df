"""Tiny runs whose models are taken out of them: one with an adapter on a scratch model, others on models with real
tokenizers, made in a moment."""

import json

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from running import start
from stretto.export.gguf_tokenizer import SPLITS
from stretto.export.saved_model import find

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADAPTER = {"rank": 4, "alpha": 8.0}
LEARNS = {"optimizer__lr": 0.05, "run__steps": 2, "evaluate__every": 0, "checkpoint__best": "reward/mean"}


def lora_run(folder, **changes):
    """A run that trained an adapter on a scratch model, far enough that the adapter matters."""
    return start(folder, model__adapter=ADAPTER, model__scratch__layers=2, **(LEARNS | changes)).folder


def run_of(folder, model, **changes):
    """A run of a model in a folder."""
    return start(folder, model__name=str(model), model__scratch=None, **(LEARNS | changes)).folder


def imitating_run(folder):
    """A run that imitated answers, and measured its loss before, between and after."""
    scratch = {"layers": 1, "width": 16, "heads": 2, "characters": "01=", "context": 64}
    changes = {"algorithm": {"name": "sft"}, "rewards": [], "engine__max_new_tokens": 24, "batch": {"prompts": 4}}
    return start(folder, **changes, model__scratch=scratch, evaluate__every=1, run__steps=2).folder


def tokenizer_of(kind):
    """A byte-level tokenizer, trained on a few words, that splits texts as a family does."""
    tokenizer = Tokenizer(models.BPE())
    split = next((regex for regex, name in SPLITS.items() if name == kind), None)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [byte_level] if split is None else [pre_tokenizers.Split(Regex(split), "isolated"), byte_level]
    steps = [pre_tokenizers.Digits(individual_digits=True), *steps] if kind == "smollm" else steps
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system 0 1 00 11 01 the answer is"] * 5, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return fast


def model_in(folder, config, *, kind, dtype=torch.float32):
    """Saves a random model of a family, with weights large enough that its answers differ."""
    tokenizer = tokenizer_of(kind)
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer) + 4, 1, 1
    config.bos_token_id = None
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    network.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def as_base_model(folder):
    """Gives a saved model an end of text of its own, which its template does not write; returns that token's id."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        edited(folder / name, eos_token_id=tokenizer.eos_token_id)
    return tokenizer.eos_token_id


def trained(run, which="newest"):
    """The model of a run."""
    return find(run, which)


def edited(path, **changes):
    """Changes keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
