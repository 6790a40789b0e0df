"""Whatever is asked for: work is conserved, no memory is overrun, and more devices never make the best plan slower."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.placement.cluster import parse_cluster
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.stage_times import PlanDurations, StageTimes
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import search, variants_of
from stretto.planner.simulate import run_step
from stretto.planner.workload import StepWorkload
from stretto.recipe.schema import Placement

ALL = variants_of(Placement())
POLICY = ("generate", "train")
PPO = ("reference", "reward", "value", "fit")
MODELS = ("qwen2.5-0.5b", "qwen2.5-3b", "llama-7b", "qwen3-30b-a3b")


@st.composite
def workloads(draw):
    """A step of any roles, sizes and lengths."""
    roles = (*POLICY, *draw(st.sampled_from([(), ("reference",), ("reference", "reward"), ("value", "fit"), PPO])))
    adapter = draw(st.sampled_from([0, 0, 16]))
    cap = draw(st.integers(16, 4096))
    prompts = draw(st.integers(1, 12))
    return StepWorkload(
        shapes=dict.fromkeys(roles, named_shape(draw(st.sampled_from(MODELS)))),
        prompts=prompts,
        oversample=draw(st.sampled_from([1.0, 1.0, 1.1, 1.5])),
        max_rounds=3,
        acceptance=draw(st.sampled_from([None, None, 0.1, 0.6])),
        samples=draw(st.integers(1, 6)),
        updates=draw(st.sampled_from([1, 1, 2, 3])),
        prompt=draw(st.integers(1, 2000)),
        lengths=LengthDistribution(mean=draw(st.floats(0.02, 0.9)) * cap, sigma=draw(st.floats(0.0, 1.5)), cap=cap),
        adapter=adapter,
        reading=frozenset({"generate", "value"} & set(roles)) | ({"reference"} & set(roles) if adapter else set()),
        precision="bfloat16",
        base="bfloat16",
        seed=draw(st.integers(0, 9)),
    )


CLUSTERS = st.sampled_from(["1xH100", "2xA100", "4xL40S", "6xA100", "4xH800+4xH20"])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(work=workloads(), cluster=CLUSTERS)
def test_every_plan_computes_each_token_once_and_keeps_to_memory(work, cluster):
    setting = PlanningProblem.of(work, parse_cluster(cluster))
    prices, rooms = StageTimes(setting), MemoryFits(setting)
    for forecast in search(setting, ALL).best:
        choice, room = forecast.choice, rooms.room(forecast.choice)
        durations = PlanDurations(prices, choice, forecast.plan)
        took = run_step(prices, choice, forecast.plan, durations, forecast.slots)
        groups = len(took.accepted)
        assert (took.accepted, took.launched) == (work.rounds.trained, work.launched)
        assert groups == work.prompts or took.rounds == work.max_rounds
        assert len(took.updates) == min(work.updates, max(1, groups * work.samples))
        spent = dict.fromkeys(("generate", *work.stages), 0)
        for stretch in took.stretches:
            spent[stretch.stage] += stretch.tokens
        accepted = sum(sum(work.drawn[index]) for index in took.accepted)
        generated = spent.pop("generate")
        assert accepted <= generated <= work.tokens
        judged = spent.pop("reward", None)  # of every group that was generated: verdicts come before acceptance
        assert judged is None or judged >= accepted + groups * work.prompt
        for tokens in spent.values():
            prompts, rest = divmod(tokens - accepted, work.prompt)
            assert rest == 0 and groups <= prompts <= groups * work.samples
        assert max(took.contexts.values()) <= room.pool
        for side in room.sides:
            assert forecast.held(side)[1].total <= side.usable
            assert side.asleep <= side.device.host_memory


@settings(max_examples=4, deadline=None, derandomize=True)
@given(work=workloads(), device=st.sampled_from(["A100", "H100", "L40S"]))
def test_the_best_plan_is_never_slower_with_more_devices(work, device):
    steps = []
    for count in (1, 2, 3, 4, 6, 8):
        found = search(PlanningProblem.of(work, parse_cluster(f"{count}x{device}")), ALL)
        steps.append(min((forecast.step for forecast in found.best), default=float("inf")))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(steps)), steps
