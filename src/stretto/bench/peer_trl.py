"""TRL's `GRPOTrainer`: the only file that imports it. Loaded in a job's own process, never by a command.

It is driven as its documentation says and as fast as it goes on the same device: all answers generated in one batch, no
reference model, no old log-probabilities, no gradient checkpointing, no logging, the fused AdamW, weights in the case's
dtype (and autocast for bf16). `batch` answers are trained at a time, accumulated to one update.

Conventions made equal: `loss_type="grpo"` is the mean over answers of the mean over tokens, epsilon 0.2, beta 0,
advantages divided by the group's standard deviation + 1e-4, AdamW with our betas and no weight decay, gradients clipped
to 1. Adapters start from the file that we start from; TRL keeps them in fp32. It keeps no fp32 masters of bf16 weights.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func`, which replays tokens, is called experimental

import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoTokenizer, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stretto.bench.cases import CAP, SEED, answer_lengths
from stretto.bench.jobs import Job, JobResult
from stretto.bench.machine import synchronize
from stretto.bench.ours import RATE
from stretto.bench.peer_generate import Forcing, lengths_of, load_plain
from stretto.bench.prepare import read_prompts
from stretto.models.load import choose_device
from stretto.rewards.answer import numeric, overlong


class StepWatch(TrainerCallback):
    """Times every step from before its generation to after its update, and keeps what is logged."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.logged: dict[str, float] = {}
        self.begun = 0.0

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        """Before the first micro-batch, whose preparation generates."""
        self.begun = time.perf_counter()

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        """After the update."""
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **keywords: Any) -> None:
        """The trainer's numbers of a step."""
        self.logged = {**self.logged, **logs}


class Sampler:
    """The model's own `generate`, told how long each answer must be, timed."""

    def __init__(self, network: Any, lengths: Mapping[tuple[int, ...], Sequence[int]], device: str) -> None:
        self.inner, self.lengths, self.device = network.generate, lengths, device
        self.seconds: list[float] = []

    def __call__(self, *, input_ids: Any, attention_mask: Any, generation_config: Any, **keywords: Any) -> Any:
        """What `generate` returns."""
        begun = time.perf_counter()
        forcing = Forcing(
            lengths_of(input_ids, attention_mask, self.lengths),
            prompt=input_ids.shape[1],
            ends=generation_config.eos_token_id,
        )
        found = self.inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([forcing]),
            **keywords,
        )
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - begun)
        return found


class Judge:
    """The reward: the very functions that judge on our side; counts the tokens it is shown."""

    __name__ = "reward"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(
        self, *, completions: Any, completion_ids: Sequence[Sequence[int]], reference: Sequence[str], **keywords: Any
    ) -> list[float]:
        """Is the first number right, less a penalty that grows with the length."""
        self.tokens.append(sum(map(len, completion_ids)))
        return [
            numeric(answer[0]["content"], wanted, "first") + overlong(len(tokens), longest=CAP, buffer=CAP)
            for answer, tokens, wanted in zip(completions, completion_ids, reference, strict=True)
        ]


def settings(job: Job, *, steps: int, replays: bool) -> GRPOConfig:
    """How TRL is asked to do the case."""
    case, batch = job.case, job.batch or job.case.answers
    return GRPOConfig(
        output_dir=str(Path(job.folder) / "trl"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=case.answers // batch,
        num_generations=case.samples,
        max_completion_length=CAP,
        temperature=1.0,
        top_p=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=case.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=choose_device("auto").type == "cpu",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        seed=SEED,
        logging_strategy="steps" if replays else "no",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trainer_of(
    job: Job, *, steps: int, judge: Judge, watch: StepWatch, answers: Mapping[str, Any] | None
) -> GRPOTrainer:
    """A trainer that samples, or one that replays `answers` (prompt id to tokens of each answer)."""
    folder, lengths = Path(job.folder), answer_lengths(job.case)
    rounds = read_prompts(job)[:steps]
    asked = [each for one in rounds for each in one]
    network: Any = load_plain(job)
    if job.case.adapter:
        network = PeftModel.from_pretrained(network, folder / "adapter", is_trainable=True)
    rows = [{"prompt": list(each.prompt.messages), "reference": each.prompt.reference} for each in asked]
    by_text = {each.prompt.messages[-1]["content"]: each for each in asked}

    def replayed(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        turns = {name: iter(said) for name, said in (answers or {}).items()}
        found = [by_text[prompt[-1]["content"]] for prompt in prompts]
        said = [next(turns[each.prompt.id]) for each in found]
        return {"prompt_ids": [each.tokens.tolist() for each in found], "completion_ids": said, "logprobs": None}

    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left", trust_remote_code=False)
    trainer = GRPOTrainer(
        model=network,
        reward_funcs=judge,
        args=settings(job, steps=steps, replays=answers is not None),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[watch],
        rollout_func=None if answers is None else replayed,
    )
    plain = network.get_base_model() if job.case.adapter else network
    by_tokens = {
        tuple(each.tokens.tolist()): row for one in rounds for each, row in zip(one, lengths.tolist(), strict=True)
    }
    plain.generate = Sampler(plain, by_tokens, watch.device)
    return trainer


def step(job: Job) -> JobResult:
    """Whole steps: sample, judge, train, update."""
    watch, judge = StepWatch(choose_device("auto").type), Judge()
    trainer = trainer_of(job, steps=1 + job.steps, judge=judge, watch=watch, answers=None)
    model = trainer.model.get_base_model() if job.case.adapter else trainer.model
    trainer.train()
    fastest = min(range(1, len(watch.seconds)), key=watch.seconds.__getitem__)
    generate = model.generate.seconds[fastest]
    return JobResult(
        name=f"TRL {trl.__version__} GRPOTrainer, batch {job.batch}",
        seconds=tuple(watch.seconds[1:]),
        stages={"generate": generate, "train": watch.seconds[fastest] - generate},
        generated=judge.tokens[fastest],
        trained=judge.tokens[fastest],
    )


def replay(job: Job) -> JobResult:
    """One step on the tokens that we sampled: the same reward, loss and gradient norm, if both do the same."""
    watch, judge = StepWatch(choose_device("auto").type), Judge()
    answers = json.loads((Path(job.folder) / "replay.json").read_text(encoding="utf-8"))
    trainer_of(job, steps=1, judge=judge, watch=watch, answers=answers).train()
    found = {name: float(watch.logged[name]) for name in ("reward", "loss", "grad_norm")}
    return JobResult(name=f"TRL {trl.__version__} GRPOTrainer", trained=judge.tokens[0], facts={"replay": found})
