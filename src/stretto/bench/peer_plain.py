"""The loop that people write first: `generate`, pad, forward, backward, AdamW. What TRL does, without TRL.

For machines that have torch and transformers and nothing else, such as a rented GPU without a package registry. Weights
are in the case's type, adapters in fp32 under autocast, all as in `peer_trl`, whose numbers it has on the same tokens:
GRPO with the mean over answers of the mean over tokens, advantages divided by the group's standard deviation + 1e-4,
gradients clipped to 1. `batch` answers are trained at a time, each padded to the longest of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessorList

from stretto.bench.cases import CAP, answer_lengths
from stretto.bench.jobs import Job, JobResult
from stretto.bench.machine import synchronize
from stretto.bench.ours import RATE
from stretto.bench.peer_generate import Forcing, answer_length, load_plain
from stretto.bench.prepare import PreparedPrompt, read_prompts
from stretto.models.load import choose_device
from stretto.rewards.answer import numeric, overlong

NAME = "a plain loop on generate"

Answers = list[list[int]]


class PlainLoop:
    """A model, its optimizer, and a step."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, choose_device("auto")
        self.network: Any = load_plain(job)
        self.model = self.network
        if job.case.adapter:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.network, Path(job.folder) / "adapter", is_trainable=True)
            for parameter in self.trained():
                parameter.data = parameter.data.float()
        self.tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left", trust_remote_code=False)
        self.optimizer = torch.optim.AdamW(self.trained(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def trained(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def generate(self, asked: Sequence[PreparedPrompt]) -> Answers:
        """Every answer of a step in one batch, as long as it was drawn."""
        ends = [self.tokenizer.eos_token_id]
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=CAP, eos_token_id=ends[0],
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        rows = [each.tokens.tolist() for each in asked for _ in range(self.job.case.samples)]
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.device)
        width = batch["input_ids"].shape[1]
        forcing = Forcing(answer_lengths(self.job.case).reshape(-1).tolist(), prompt=width, ends=ends)
        self.model.eval()
        with torch.no_grad(), self.autocast():
            found = self.model.generate(
                **batch, generation_config=settings, logits_processor=LogitsProcessorList([forcing])
            )
        self.model.train()
        return [row[: answer_length(row, ends[0])] for row in found[:, width:].tolist()]

    def autocast(self) -> torch.autocast:
        """bf16 products where the case says so."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.case.dtype == "bfloat16")

    def judge(self, asked: Sequence[PreparedPrompt], answers: Answers) -> Tensor:
        """The rewards, as our side judges."""
        owners = [each for each in asked for _ in range(self.job.case.samples)]
        return torch.tensor(
            [
                numeric(self.tokenizer.decode(said, skip_special_tokens=True), str(each.prompt.reference), "first")
                + overlong(len(said), longest=CAP, buffer=CAP)
                for each, said in zip(owners, answers, strict=True)
            ],
            dtype=torch.float32,
        )

    def train(self, asked: Sequence[PreparedPrompt], answers: Answers) -> dict[str, float]:
        """An update; its numbers."""
        rewards = self.judge(asked, answers)
        groups = rewards.view(-1, self.job.case.samples)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        rows = [each.tokens.tolist() for each in asked for _ in range(self.job.case.samples)]
        loss = 0.0
        told = list(zip(rows, answers, advantages.reshape(-1), strict=True))
        size = self.job.batch or len(rows)
        for start in range(0, len(rows), size):
            with self.autocast():
                part = self.loss(told[start : start + size]) / len(rows)
            part.backward()
            loss += part.item()
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"reward": float(rewards.mean()), "loss": loss, "grad_norm": norm}

    def loss(self, some: Sequence[tuple[list[int], list[int], Tensor]]) -> Tensor:
        """The sum over these answers of the mean over their tokens."""
        longest = max(len(said) for _, said, _ in some)
        pad = self.tokenizer.pad_token_id
        tokens = torch.tensor([prompt + said + [pad] * (longest - len(said)) for prompt, said, _ in some])
        mask = torch.tensor([[1] * len(said) + [0] * (longest - len(said)) for _, said, _ in some])
        seen = torch.cat([torch.ones(len(some), tokens.shape[1] - longest, dtype=mask.dtype), mask], 1)
        tokens, mask, seen = (each.to(self.device) for each in (tokens, mask, seen))
        logits = self.model(input_ids=tokens, attention_mask=seen, logits_to_keep=longest + 1).logits[:, :-1]
        chosen = tokens[:, -longest:].unsqueeze(-1)
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, chosen).squeeze(-1)
        advantage = torch.stack([each for _, _, each in some]).to(self.device).unsqueeze(1)
        ratio = torch.exp(logprobs - logprobs.detach())  # on policy it is 1, and has a gradient
        each = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask
        return (each.sum(1) / mask.sum(1)).sum()


def step(job: Job) -> JobResult:
    """Whole steps: sample, judge, train, update; the first does not count."""
    loop, took = PlainLoop(job), list[tuple[float, float]]()
    tokens = 0
    for asked in read_prompts(job):
        begun = time.perf_counter()
        answers = loop.generate(asked)
        synchronize(loop.device.type)
        sampled = time.perf_counter()
        loop.train(asked, answers)
        synchronize(loop.device.type)
        took.append((sampled - begun, time.perf_counter() - sampled))
        tokens = sum(map(len, answers))
    generate, train = min(took[1:], key=sum)
    return JobResult(
        name=f"{NAME}, batch {job.batch}",
        seconds=tuple(map(sum, took[1:])),
        stages={"generate": generate, "train": train},
        generated=tokens,
        trained=tokens,
    )


def replay(job: Job) -> JobResult:
    """One update on the tokens that we sampled: the same reward, loss and gradient norm, if both do the same."""
    said = json.loads((Path(job.folder) / "replay.json").read_text(encoding="utf-8"))
    loop, (asked, *_) = PlainLoop(job), read_prompts(job)
    answers = [tokens for each in asked for tokens in said[each.prompt.id]]
    loop.model.train()
    return JobResult(name=NAME, trained=sum(map(len, answers)), facts={"replay": loop.train(asked, answers)})
