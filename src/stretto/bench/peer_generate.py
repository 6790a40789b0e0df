"""Hugging Face `generate`: the batch of all answers at once, sampled at temperature 1 with a key-value cache.

`Forcing` makes each answer as long as ours: a token that ends a turn is impossible before its length and certain at it.
It writes into the logits in place, so it costs the peer next to nothing. Also used by the TRL side, which samples with
the same call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor, LogitsProcessorList

from stretto.bench.cases import CAP, answer_lengths
from stretto.bench.jobs import Job, JobResult
from stretto.bench.machine import synchronize
from stretto.bench.prepare import read_prompts
from stretto.errors import StrettoError
from stretto.models.load import DTYPES, choose_device


class Forcing(LogitsProcessor):
    """Ends each row of a batch after a length of its own."""

    def __init__(self, lengths: Sequence[int], *, prompt: int, ends: Sequence[int]) -> None:
        self.lengths, self.prompt = torch.tensor(lengths), prompt
        self.ends = list(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores in which only what may be sampled now is possible."""
        ending = (self.lengths == input_ids.shape[1] - self.prompt + 1).nonzero()[:, 0].tolist()
        scores[:, self.ends] = float("-inf")
        if ending:
            scores[ending] = float("-inf")
            scores[ending, self.ends[0]] = 0.0
        return scores


def lengths_of(rows: Tensor, mask: Tensor, known: Mapping[tuple[int, ...], Sequence[int]]) -> list[int]:
    """The lengths for the rows of a batch: the n-th row of a prompt gets the n-th length of it."""
    seen: dict[tuple[int, ...], int] = {}
    lengths = []
    for row, real in zip(rows, mask.bool(), strict=True):
        prompt = tuple(row[real].tolist())
        if prompt not in known:
            raise StrettoError("the peer renders a prompt to other tokens than stretto, so the work would not be equal")
        turn = seen.setdefault(prompt, 0)
        seen[prompt] += 1
        lengths.append(known[prompt][turn])
    return lengths


def load_plain(job: Job) -> Any:
    """The model as transformers loads it."""
    network = AutoModelForCausalLM.from_pretrained(job.model, dtype=DTYPES[job.case.dtype], trust_remote_code=False)
    return network.to(choose_device("auto"))


def rollout(job: Job) -> JobResult:
    """Every answer of the case in one batch."""
    lengths = answer_lengths(job.case)
    network, device = load_plain(job).eval(), choose_device("auto")
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left", trust_remote_code=False)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=CAP,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    flat = lengths.reshape(-1).tolist()
    seconds = []
    for asked in read_prompts(job):
        rows = [each.tokens.tolist() for each in asked for _ in range(job.case.samples)]
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(device)
        width = batch["input_ids"].shape[1]
        forcing = Forcing(flat, prompt=width, ends=[tokenizer.eos_token_id])
        begun = time.perf_counter()
        with torch.no_grad():
            found = network.generate(
                **batch, generation_config=settings, logits_processor=LogitsProcessorList([forcing])
            )
        synchronize(device.type)
        seconds.append(time.perf_counter() - begun)
    generated = [answer_length(row, tokenizer.eos_token_id) for row in found[:, width:].tolist()]
    if generated != flat:
        raise StrettoError("generate made answers of other lengths than it was told to")
    return JobResult(
        name=f"Hugging Face generate (transformers {transformers.__version__})",
        seconds=tuple(seconds[1:]),
        generated=sum(generated),
    )


def answer_length(row: Sequence[int], end: int) -> int:
    """Tokens up to the first end of turn, which counts."""
    return row.index(end) + 1 if end in row else len(row)
