"""What the cost model says to a posed row, in the row's own unit. Steps are put together by the closed forms."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cases import Case, number, pool_tokens
from weight_syncs import handed_over

from stretto.placement import closed_forms as closed
from stretto.placement.closed_forms import Stages
from stretto.planner.cost import memory
from stretto.planner.cost.decode_time import decode
from stretto.planner.cost.lengths import Counts, LengthDistribution
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.token_load import TokenLoad


@lru_cache(maxsize=256)
def sampled(lengths: LengthDistribution, batch: int) -> Counts:
    """One draw of a step's lengths: groups of 16, as most rows have."""
    samples = 16 if batch % 16 == 0 else 1
    return lengths.sample(batch // samples, samples)


def pool(case: Case) -> float:
    """Tokens that the caches of a lane hold."""
    share = case.facts.alone if case.separate else case.facts.share
    return pool_tokens(case.shape, case.engine, share=share, precision=case.precision)


def generate_seconds(case: Case, costs: Costs) -> float:
    """The slower of two lanes: the one with the longest answer and the one with most to do. Answers are dealt out."""
    answers = [length for group in sampled(case.lengths, case.batch) for length in group]

    def tick(batch: float, context: float) -> float:
        return costs.tick(case.shape, case.engine, batch, context, precision=case.precision)

    def prefill(tokens: float) -> float:
        prompt = case.prompt or 1.0
        load = TokenLoad.sequence(prompt, count=tokens / prompt)
        return costs.prefill(case.shape, case.engine, load, precision=case.precision)

    lanes = [answers[lane :: case.lanes] for lane in range(min(case.lanes, len(answers)))]
    worst = (max(lanes, key=lambda lane: (max(lane), sum(lane))), max(lanes, key=sum))
    slots = case.facts.slots * case.engine.mesh.dp
    return max(decode(lane, case.prompt, tick, slots=slots, pool=pool(case), prefill=prefill).seconds for lane in worst)


def streaming_seconds(case: Case, costs: Costs) -> float:
    """Generating a batch where lanes never drain: a bounded lag only asks that the longest answer ends in time."""
    live = case.prompt + case.lengths.mean / 2
    batch = max(1.0, min(case.facts.slots * case.engine.mesh.dp, pool(case) / live, case.batch / case.lanes))
    tick = costs.tick(case.shape, case.engine, batch, live, precision=case.precision)
    whole = case.batch * case.lengths.mean / case.lanes / batch * tick
    return whole if case.facts.interrupts else max(whole, case.lengths.cap * tick / (1 + max(1.0, case.staleness)))


def stages(case: Case, costs: Costs) -> Stages:
    """Seconds of each stage of the step."""
    load = TokenLoad.groups(case.prompt, sampled(case.lengths, case.batch), shared=False)
    forward = costs.forward(case.shape, case.trainer, load, precision=case.precision)
    train = costs.train(
        case.shape, case.trainer, load, updates=case.updates, adapter=case.adapter, recompute=case.facts.recompute,
        precision=case.precision,
    )  # fmt: skip
    publish = handed_over(case, costs).seconds
    offloaded = memory.states(case.shape, case.trainer, adapter=case.adapter).optimizer
    old = 0.0 if case.streams and case.facts.interrupts else forward
    reference = forward if case.facts.reference else 0.0
    turn = costs.turn(case.trainer.mesh.devices)
    turns = turn * (1 + bool(old) + bool(reference))
    switch = turns if case.separate else (turns + turn) / 2 + costs.move(offloaded, case.trainer)
    return Stages(
        generate=streaming_seconds(case, costs) if case.streams else generate_seconds(case, costs),
        old=old, reference=reference, train=train, publish=publish, switch=switch,
    )  # fmt: skip


def step_seconds(case: Case, costs: Costs) -> float:
    """A whole step."""
    at = stages(case, costs)
    if not case.separate:
        return closed.flatten(at)
    if case.staleness:
        return max(at.generate + at.publish, at.forwards + at.train) + at.switch
    return closed.pipeline([at.generate, at.forwards + at.train], max(case.updates, 1), at.publish) + at.switch


def answer(case: Case, costs: Costs) -> float | str:
    """The model's value for the row, or why it has none."""
    metric, gpus = case.row["metric"], number(case.row, "gpus")
    if metric == "peak_gpu_memory":
        return allocated_gb(case)
    if case.row["strategy_id"] == "train_only":
        return _trainer_answer(case, costs, metric)
    if metric.startswith("weight_sync_time"):
        return handed_over(case, costs).seconds
    if case.row["strategy_id"] not in ("flatten", "separate"):
        return f"has a strategy ({case.row['strategy_id']}) without closed form"
    if pool(case) < case.prompt + case.lengths.cap:
        return "leaves no room for the longest answer with the layout it states"
    tokens = case.batch * (case.prompt + case.lengths.mean)
    fresh = case.batch * case.lengths.mean
    answers = {
        "step_time": lambda: step_seconds(case, costs),
        "total_time_100_steps": lambda: step_seconds(case, costs) / 36,
        "total_train_time": lambda: step_seconds(case, costs),
        "throughput_per_gpu": lambda: tokens / step_seconds(case, costs) / gpus,
        "throughput_total": lambda: tokens / step_seconds(case, costs),
        "generation_time": lambda: stages(case, costs).generate,
        "rollout_time": lambda: stages(case, costs).generate,
        "generation_throughput_per_gpu": lambda: fresh / stages(case, costs).generate / gpus,
        "old_logprob_time": lambda: stages(case, costs).old,
        "old_logprob_throughput_per_gpu": lambda: tokens / stages(case, costs).old / gpus,
        "actor_update_time": lambda: stages(case, costs).train,
    }
    return answers[metric]() if metric in answers else f"measures what is not modeled ({metric})"


def _trainer_answer(case: Case, costs: Costs, metric: str) -> float | str:
    load = TokenLoad.sequence(case.lengths.mean, count=case.batch)
    if "force-balanced" in case.row["notes"]:
        costs = replace(costs, rates=replace(costs.rates, skew=1.0))
    seconds = costs.train(
        case.shape, case.trainer, load, adapter=case.adapter, recompute="AC " in case.row["strategy"],
        precision=case.precision, budget=case.lengths.mean,
    )  # fmt: skip
    if metric == "microbatch_time":
        return seconds
    if metric == "train_throughput_per_gpu":
        return load.tokens / seconds / number(case.row, "gpus")
    return f"measures what is not modeled ({metric})"


def allocated_gb(case: Case) -> float:
    """At the peak, as the allocator counts: without the process itself. Sharded weights are fp32, frozen ones too."""
    mesh = Mesh(devices=case.trainer.mesh.devices, zero=3)
    held = memory.training(
        case.shape, Site(device=case.trainer.device, mesh=mesh), case.lengths.mean, adapter=case.adapter,
        base="float32", kind="offload" if "AC Offload" in case.row["strategy"] else "recompute",
        chunked="SFT" not in case.row["algorithm"],
    )  # fmt: skip
    return (held.total - held.context) / 2**30
