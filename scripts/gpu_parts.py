"""The parts of `scripts/gpu_hour`: each returns whether what it checked holds, and lines for the page."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
GROUPS = (8, 32)
"""Groups of 8 answers that are decoded at once."""
MODELS = Path(tempfile.gettempdir()) / "stretto-gpu-hour-models"
"""Random weights by shape, made once and read by every part that asks for them."""
WAYS = {
    "LoRA, bf16": ["model.adapter={kind: lora, rank: 16}"],
    "LoRA, NF4": ["model.adapter={kind: lora, rank: 16}", "model.quantize=nf4"],
    "full, 8-bit AdamW": ["model.adapter=null", "optimizer.name=adamw8bit"],
}
"""How a model is trained -> changes to the recipe."""
BATCHES = (8, 64)
"""Answers that the plain loop trains at once: the fastest counts for time, the leanest for memory."""

Found = tuple[bool, list[str]]


def gradients(tiny: bool) -> Found:
    """Gradients of packed rows here against a plain loop over conversations in fp64 on the CPU."""
    import torch

    from stretto.algorithms.base import build
    from stretto.models.load import choose_device, load
    from stretto.recipe.schema import Adapter, AlgorithmSection, Optimizer
    from stretto.training.optimizer import MasterAdamW
    from stretto.training.trainer import Trainer
    from tiny import SCRATCH_FILES, credited, naive_step, random_groups, scratch_model

    algorithm, device, lines, right = build(AlgorithmSection()), choose_device("auto"), [], True
    torch.set_float32_matmul_precision("highest")
    for dtype, bound in (("float64", 1e-9), ("float32", 1e-4)):
        for adapter in (None, Adapter(rank=4)):
            samples = credited(algorithm, random_groups(3))
            model = {"adapter": adapter, "width": 64, "heads": 4}
            plain = load(scratch_model(dtype="float64", **model), SCRATCH_FILES, seed=0, device=torch.device("cpu"))
            _, wanted = naive_step(plain, algorithm, samples)
            policy = load(scratch_model(dtype=dtype, **model), SCRATCH_FILES, seed=0, device=device)
            optimizer = MasterAdamW(policy.trained(), Optimizer(lr=2e-4), updates=1)
            trainer = Trainer(
                policy, algorithm, optimizer, token_budget=4096, temperature=1.0, clip=None, checkpointing="auto"
            )
            trainer.accumulate(samples)
            found = {name: each.cpu().double() for name, each in trainer._mean_gradients().items()}
            one, other = (torch.cat([each[name].double().flatten() for name in wanted]) for each in (found, wanted))
            apart = float((one - other).norm() / other.norm())
            right &= apart <= bound
            kind = "LoRA" if adapter else "all weights"
            lines.append(f"{dtype}, {kind}: relative difference {apart:.1e}, at most {bound:.0e}")
    return right, lines


def engine(tiny: bool) -> Found:
    """Greedy answers of the native engine against `generate`, on random weights in fp32."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from stretto.bench.random_model import random_policy
    from stretto.engines.base import Request
    from stretto.engines.native.engine import NativeEngine
    from stretto.models.load import choose_device, load
    from stretto.models.source import locate
    from stretto.recipe.schema import ModelSection

    device, rng = choose_device("auto"), np.random.default_rng(0)
    torch.set_float32_matmul_precision("highest")
    with tempfile.TemporaryDirectory(prefix="stretto-gpu-hour-") as name:
        folder = Path(name)
        if tiny:
            section = ModelSection(name="scratch", dtype="float32", adapter=None)
            load(section, locate("scratch", folder), seed=0, device=device).save(folder)
        else:
            random_policy(SHAPES[0], dtype=torch.float32, device=device, seed=0).save(folder)
        section = ModelSection(name=name, dtype="float32", adapter=None)
        policy = load(section, locate(name, folder), seed=0, device=device)
        plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    prompts = [rng.integers(1, plain.config.vocab_size, size) for size in (5, 19, 40, 43)]
    wanted = []
    for prompt in prompts:
        row = torch.tensor(prompt, device=device).unsqueeze(0)
        with torch.no_grad():
            said = plain.generate(
                row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=32, eos_token_id=None
            )
        wanted.append(said[0, len(prompt) :].tolist())
    requests = [
        Request(key=number, tokens=prompt, max_new_tokens=32, stop=frozenset(), temperature=0.0)
        for number, prompt in enumerate(prompts)
    ]
    native, answers = NativeEngine(policy), {}
    native.submit(requests)
    while done := native.step(60.0):
        answers |= {each.key: each.tokens.tolist() for each in done}
    same = sum(answers[number] == each for number, each in enumerate(wanted))
    return same == len(prompts), [f"{same} of {len(prompts)} greedy answers of 32 tokens are those of `generate`"]


def resume(tiny: bool) -> Found:
    """Four steps at once against two and, after a resume, two more: the weights to the last bit."""
    import torch
    from safetensors.torch import load_file

    import stretto
    from running import recipe_in

    with tempfile.TemporaryDirectory(prefix="stretto-gpu-hour-") as name:
        folder = Path(name)
        sections = recipe_in(folder, run__steps=4).model_dump(mode="json")
        whole = stretto.train({**sections, "run": {"steps": 4, "folder": str(folder / "whole")}}, quiet=True)
        half = stretto.train({**sections, "run": {"steps": 2, "folder": str(folder / "half")}}, quiet=True)
        half = stretto.resume(half, changes=["run.steps=4"], allow=["run.steps"], quiet=True)
        one, other = (
            load_file(Path(run.folder) / "checkpoints" / "step-000004" / "model.safetensors") for run in (whole, half)
        )
    apart = max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
    right = all(torch.equal(one[name], other[name]) for name in one)
    return right, ["the weights are equal to the last bit" if right else f"weights differ by up to {apart:.1e}"]


def tests(tiny: bool) -> Found:
    """The project's own tests that need a GPU."""
    if tiny:
        return True, ["left out: they need a GPU"]
    if importlib.util.find_spec("pytest") is None:
        return True, ["left out: pytest is not installed"]
    import torch

    needs = "gpu or multi_gpu" if torch.cuda.device_count() > 1 else "gpu"
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-m", needs, "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += [*workers, "tests/gpu"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    wanted = ("FAILED", "ERROR", "E  ", *"0123456789")
    told = [line for line in done.stdout.splitlines() if line.startswith(wanted)]
    nothing = done.returncode == 5  # no test was chosen
    told = ["no test ran"] if nothing else told or (done.stdout + done.stderr).splitlines()
    return done.returncode in (0, 5), told[-60:]


def step(tiny: bool, shape: str, kind: str, prompt: str) -> Found:
    """Steps of ours beside the plain loop: seconds, memory, and the same numbers on the same tokens."""
    from stretto.bench.cases import BenchCase
    from stretto.bench.compare import BenchSettings, step_rows
    from stretto.bench.jobs import run_apart
    from stretto.bench.machine import threads

    few = {"prompts": 2, "samples": 4, "dtype": "float32"} if tiny else {}
    case = BenchCase(name=f"{kind}-{prompt}", prompt=int(prompt), adapter=kind == "lora", **few)
    with tempfile.TemporaryDirectory(prefix="stretto-gpu-hour-") as folder:
        setting = BenchSettings(
            model="scratch", shape=None if shape == "scratch" else shape, folder=Path(folder), threads=threads(),
            steps=1 if tiny else 3, turns=1, batches=(8,) if tiny else BATCHES, run=run_apart,
            note=say, peer="plain",
        )  # fmt: skip
        time_row, memory_row = step_rows(setting, case)
    lines = []
    for row in (time_row, memory_row):
        lines.append(
            f"{row['stretto']:.3g} against {row['peer']:.3g} {row['unit']}, {row['ratio']:.2f} times better than "
            f"{row['peer_name']}"
        )
    parts = {name: ", ".join(f"{k} {v:.3g}" for k, v in each.items()) for name, each in time_row["seconds"].items()}
    lines += [f"{name}: {told} s" for name, told in parts.items()]
    lines += [f"{name}: {size:.2f} GB" for name, size in memory_row["memory"].items()]
    lines += [f"left out, {name}: {why}" for name, why in time_row["failed"].items()]
    norms = time_row["replay"]["grad_norm"]
    lines.append(f"gradient norm on the same tokens: {norms['stretto']:.6g} and {norms['peer']:.6g}")
    share = time_row["share_of_matmul_rate"]["stretto"]
    lines.append(f"{share:.0%} of the matmul rate, {time_row['matmul_gflops_per_second'] / 1e3:.3g} TFLOP/s")
    return True, lines


def limits(tiny: bool, shape: str) -> Found:
    """What the card itself can do: a large copy, a large product."""
    import torch

    if tiny:
        return True, ["left out: they are of a GPU"]
    told = []
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = _fastest(lambda: target.copy_(source))
    told.append(f"a copy moves {2 * source.nbytes / seconds / 1e12:.2f} TB/s, read and written")
    one, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = _fastest(lambda: one @ other)
    told.append(f"a bf16 product of 8192 x 8192 x 8192 runs at {2 * 8192**3 / seconds / 1e12:.0f} TFLOP/s")
    return True, told


def _fastest(work: Callable[[], object], times: int = 12) -> float:
    """Seconds of the fastest of some repetitions, after three that do not count."""
    from stretto.bench.machine import synchronize

    taken = []
    for _ in range(times + 3):
        synchronize("cuda")
        begun = time.perf_counter()
        work()
        synchronize("cuda")
        taken.append(time.perf_counter() - begun)
    return min(taken[3:])


def saved_model(shape: str) -> Path:
    """The folder of a model with random weights of this shape, in bf16 on a GPU."""
    import torch

    from stretto.bench.random_model import random_policy
    from stretto.models.load import choose_device

    folder = MODELS / shape
    if not (folder / "config.json").exists():
        device = choose_device("auto")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random_policy(shape, dtype=dtype, device=device, seed=0).save(folder)
        say(f"{shape} is in {folder}")
    return folder


def say(text: str) -> None:
    """What happens, for whoever waits, and for the page if a part does not come to its end."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def decode(tiny: bool, shape: str) -> Found:
    """Tokens a second of the native engine, with decode steps as they come and replayed from CUDA graphs."""
    import numpy as np

    from stretto.engines.native.engine import NativeEngine
    from stretto.models.load import choose_device, load
    from stretto.models.source import locate
    from stretto.recipe.schema import ModelSection

    device, (few, many) = choose_device("auto"), (4, 8) if tiny else (32, 256)
    name, dtype = ("scratch", "float32") if tiny else (str(saved_model(shape)), "bfloat16")
    section = ModelSection(name=name, dtype=dtype, adapter=None)
    policy = load(section, locate(name, TOP), seed=0, device=device)
    say("loaded")
    policy.network.requires_grad_(False)
    weights = sum(weight.nbytes for weight in policy.network.parameters())
    rng, lines = np.random.default_rng(0), [f"weights: {weights / 1e9:.2f} GB"]
    prompts = [rng.integers(7, 16 if tiny else 90, 43) for _ in range(max(GROUPS))]
    for groups in GROUPS[:1] if tiny else GROUPS:
        said = []
        for graphs, longest in ((False, few), (True, many)):
            engine, seconds = NativeEngine(policy, graphs=graphs, speculate=False), []
            for _ in range(2):  # sizes are recorded in the first round
                begun = time.perf_counter()
                answers = _answers(engine, prompts[:groups], longest=longest)
                seconds.append(time.perf_counter() - begun)
                say(f"{len(answers)} answers, graphs {graphs}: {seconds[-1]:.2f} s")
            said.append([tokens[:few] for tokens in answers])
            how, best = "from graphs" if graphs else "as they come", min(seconds)
            lines.append(
                f"{len(answers)} answers of {longest} tokens, steps {how}: {len(answers) * longest / best:,.0f} "
                f"tokens/s, {1e3 * best / longest:.2f} ms a step (rounds of "
                f"{', '.join(f'{each:.2f}' for each in seconds)} s)"
            )
        same = sum(one == other for one, other in zip(*said, strict=True))
        lines.append(f"{same} of {len(said[0])} answers have the same first {few} tokens in both ways")
        if device.type == "cuda":
            lines += _kernels(partial(_answers, engine, prompts[:groups], longest=many), many)
    return True, lines


def _answers(engine: Any, prompts: Sequence[Any], *, longest: int) -> list[list[int]]:
    """Tokens of 8 answers to each prompt."""
    from stretto.engines.base import Request

    found, none = {}, frozenset[int]()
    asked = [
        Request(key=key, tokens=prompts[key // 8], max_new_tokens=longest, stop=none, temperature=1.0)
        for key in range(8 * len(prompts))
    ]
    engine.submit(asked)
    while done := engine.step(60.0):
        found |= {each.key: each.tokens.tolist() for each in done}
    return [found[request.key] for request in asked]


def _kernels(work: Callable[[], object], steps: int) -> list[str]:
    """What the card does of some work, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
    kernels = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
    total, count = sum(each.self_device_time_total for each in kernels), sum(each.count for each in kernels)
    told = [f"of a step the card computes for {total / 1e3 / steps:.2f} ms, in {count / steps:.0f} kernels"]
    for each in kernels[:12]:
        told.append(
            f"kernel {each.self_device_time_total / 1e3 / steps:.3f} ms a step, {each.count / steps:.0f} times: "
            f"{each.key[:90]}"
        )
    return told


def forecast(tiny: bool, shape: str) -> Found:
    """Steps of a recipe in each of `WAYS`, the rehearsal before them: time and memory beside what was predicted."""
    import gc

    import torch

    from stretto.errors import StrettoError

    lines, right = [], True
    model = "scratch" if shape == "scratch" else str(saved_model(shape))
    for way, changes in WAYS.items():
        if model == "scratch" and "nf4" in changes[-1]:
            continue
        try:
            told = asyncio.run(_steps(model, changes, longest=8 if tiny else 256, steps=1 if tiny else 2))
        except (StrettoError, RuntimeError, ImportError) as error:
            right, told = False, [f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"]
        lines += [f"{way}: {line}" for line in told]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            lines.append(f"{way}: {torch.cuda.memory_allocated() / 2**30:.2f} GB are left behind")
            torch.cuda.reset_peak_memory_stats()
    return right, lines


async def _steps(model: str, changes: list[str], *, longest: int, steps: int) -> list[str]:
    """What they took and what was expected of them."""
    import torch

    from stretto.api.recipes import open_recipe
    from stretto.planner.forecast import setting_of
    from stretto.runtime.build import build_runtime
    from stretto.runtime.forecast import expectation, planned
    from stretto.runtime.memory_rehearsal import rehearse_if_asked
    from stretto.runtime.plans import cluster_of_run
    from stretto.runtime.schedule import run_step
    from stretto.runtime.spans import Clock

    few, gpu = {"batch.prompts": 4, "batch.samples": 2}, torch.cuda.is_available()
    sizes = {"batch.prompts": 16, "batch.samples": 8} if gpu else few
    # Random weights hardly ever end an answer, so all are as long as they may be.
    sizes |= {"engine.max_new_tokens": longest, "batch.lengths.response.mean": longest}
    sizes |= {"batch.lengths.response.sigma": 0.01, "batch.lengths.response.cap": longest, "evaluate.every": 0}
    settings = [f"{key}={value}" for key, value in sizes.items()]
    file = "tiny" if model == "scratch" else "smollm2-addition"
    recipe = open_recipe(
        str(TOP / "recipes" / f"{file}.yaml"),
        [f"model.name={model}", "guards.max_k3=null", "checkpoint.best=null", *settings, *changes],
        deep=False,
    )
    notes = list[str]()

    def note(text: str) -> None:
        say(text)
        notes.append(text)

    plan = planned(recipe, TOP, note).plan
    setting = setting_of(recipe, TOP, cluster_of_run(recipe))
    expected = expectation(recipe, setting, plan) or {"seconds": {}, "memory_gb": {}}
    begun = time.perf_counter()
    parts = await build_runtime(recipe, plan=plan, root=TOP, folder=None, note=note)
    loaded, rows = time.perf_counter() - begun, []
    say(f"{' '.join(changes)}: loaded in {loaded:.1f} s")
    try:
        await rehearse_if_asked(parts, note)
        for step in range(1, steps + 2):
            clock = Clock(devices=parts.devices)
            clock.begin()
            taken = await run_step(parts, clock, step=step)
            rows.append({**clock.metrics(), "kl": taken.report["kl/engine_trainer"]})
            say(f"step {step}: {rows[-1]['seconds/step']:.2f} s")
        (peak,) = (await parts.memory()).values()
    finally:
        await parts.close()
    fastest = min(rows[1:], key=lambda row: row["seconds/step"])
    seconds = {name.removeprefix("seconds/"): value for name, value in fastest.items() if name.startswith("seconds/")}
    parted = ", ".join(
        f"{name} {expected['seconds'].get(name, 0):.3g}/{value:.3g}" for name, value in seconds.items() if value > 1e-3
    )
    (memory,) = expected["memory_gb"].values() or (float("nan"),)
    return [
        f"loaded in {loaded:.1f} s; {'; '.join(notes)}",
        f"seconds predicted/measured: {parted} (first step {rows[0]['seconds/step']:.2f})",
        f"GB predicted/measured: {memory:.2f}/{peak:.2f}; k3 of engine and trainer {fastest['kl']:.1e}",
    ]


def study(tiny: bool, shape: str) -> Found:
    """Steps of the published A*PO study beside its authors' 15.3 s on one H100."""
    if tiny:
        return True, ["left out: its model is of 3B"]
    command = [sys.executable, "-m", "stretto", "bench", "study", "--shape", shape, "--case", "all", "--steps", "2"]
    done = subprocess.run([*command, "--json"], cwd=TOP, capture_output=True, text=True)
    told = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    return done.returncode == 0, told[-60:]


def plan(tiny: bool, shape: str) -> Found:
    """`stretto plan --measure`: how well the forecast tells steps before and after it has seen some."""
    import torch

    with tempfile.TemporaryDirectory(prefix="stretto-gpu-hour-") as name:
        folder = Path(name)
        recipe = str(TOP / "recipes" / "tiny.yaml")
        changes, cluster = ["model.scratch.warmup_steps=2", "evaluate.every=0"], "1xcpu"
        if not tiny:
            cluster = f"1x{torch.cuda.get_device_name()}"
            recipe = str(TOP / "recipes" / "smollm2-addition.yaml")
            changes = [f"model.name={saved_model(shape)}", "engine.max_new_tokens=64"]
        command = [sys.executable, "-m", "stretto", "plan", recipe, *changes, "--cluster", cluster, "--measure"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return False, told[-8:]
    table = done.stdout.splitlines()
    return True, [*told[-3:], *[line for line in table if line.strip()][:6]]


PARTS: dict[str, Callable[..., Found]] = {
    "gradients": gradients, "engine": engine, "resume": resume, "tests": tests, "limits": limits, "decode": decode,
    "forecast": forecast, "study": study, "step": step, "plan": plan,
}  # fmt: skip
