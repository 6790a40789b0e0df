"""Lanes of several processes that generate together, which start from here: a process of its own imports no test."""

import os
import signal
import time
import warnings

import numpy as np
import torch

from families import FAMILIES, sharpen
from families import LORA as ADAPTER
from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.truncation import Truncation
from stretto.models.lora import add_adapter
from stretto.models.quantised import quantise
from stretto.placement.transport import TensorPath
from stretto.recipe.schema import NativeEngineSection
from stretto.types import Weights
from stretto.workers.lanes import lane_engine
from stretto.workers.process_group import ProcessGroup, Rendezvous
from stretto.workers.worker_spec import LaneSpec
from tiny import CPU, VOCABULARY, policy_from, scratch_policy

LORA = {"kind": "lora", "rank": 3, "alpha": 4}
WIDE = {"width": 32, "heads": 4}
CASES = {
    "full": WIDE,
    "lora": WIDE | {"adapter": LORA},
    "few": WIDE | {"adapter": LORA},
    "half precision": WIDE | {"dtype": "bfloat16"},
    "four bits": WIDE | {"adapter": LORA, "quantize": "nf4"},
    "qwen3 with wide heads": None,
    "qwen3 with experts": None,
    "qwen3 with experts, lora": None,
    "qwen3 with experts, whole": None,
    "qwen3 with experts, int8": None,
    "deepseek v3 with narrow values": None,
    "deepseek v3 with narrow values, lora": None,
}
"""What scratch models are made of; a family where there is nothing."""


def policy_of(case):
    """A model of its own for whoever asks."""
    if CASES[case]:
        return scratch_policy(**CASES[case])
    family, _, more = case.partition(", ")
    policy = policy_from(FAMILIES[family]())
    if more == "int8":
        sharpen(policy.network)
        quantise(policy.network, "int8", CPU)
    if more in ("lora", "int8"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experts in few bits get no adapter
            policy.adapted = add_adapter(policy.network, ADAPTER, seed=0)
    if more != "int8":
        sharpen(policy.network)
    return policy


def section_of(case):
    """The engine of a case; "few" draws from some tokens only."""
    return NativeEngineSection(top_k=5, top_p=0.9) if case == "few" else NativeEngineSection()


def plain_engine(case):
    """The engine of one device, for the same case, and its policy."""
    policy, section = policy_of(case), section_of(case)
    return NativeEngine(policy, truncation=Truncation(top_p=section.top_p, top_k=section.top_k)), policy


def requests(seed, count):
    """Requests of which some begin alike, greedy ones among them."""
    chance = np.random.default_rng(seed)
    shared = chance.integers(1, VOCABULARY, size=12)
    made = []
    for index in range(count):
        own = chance.integers(1, VOCABULARY, size=int(chance.integers(1, 9)))
        tokens = np.concatenate([shared, own if index % 3 else own[:0]])
        made.append(
            Request(
                key=int(chance.integers(0, 1 << 64, dtype=np.uint64)),
                tokens=tokens,
                max_new_tokens=int(chance.integers(3, 20)),
                stop=frozenset({0}) if index % 2 else frozenset(),
                temperature=[1.0, 0.0, 0.7][index % 3],
            )
        )
    return made


def served(engine, policy, clock):
    """What becomes of requests of which some come late and some are taken out in the middle, before and after a
    publish; `clock` makes seconds of those that a round has."""
    early, late = requests(1, 7), requests(2, 4)
    done = []
    for version in (1, 2):
        engine.submit(early)
        for _ in range(3):
            done += engine.step(clock(0.0))
        done += engine.abort([early[0].key, early[4].key])
        engine.submit(late)
        done += engine.step(clock(0.0)) + engine.abort([late[1].key])
        while found := engine.step(clock(60.0)):
            done += found
        if version == 1:
            publish(engine, policy)
    return [(c.key, c.tokens, c.logprobs, c.stop, c.version, c.kept) for c in done]


def publish(engine, policy):
    """Other weights under the next version."""
    with torch.no_grad():
        for index, weight in enumerate(policy.trained().values()):
            weight.add_(0.1 * torch.sin(torch.arange(weight.numel()) + index).view(weight.shape).to(weight.dtype))
    engine.receive(Weights(version=1, manifest={}, where="shared"))


def lane_of(case, rank, size, team=None):
    """One process's engine of a lane that nobody has met yet, and its policy."""
    policy = policy_of(case)
    spreads = case.endswith("whole") or team is not None
    lane = LaneSpec(cell="generate", rank=rank, size=size, team=team or size, spreads=spreads)
    return lane_engine(policy, section_of(case), lane, CPU), policy


def met(address, name, rank, size, seconds=60.0):
    """The processes of a lane, once all have come."""
    meeting = Rendezvous(store=address, name=name, rank=rank, size=size, seconds=seconds, path=TensorPath.GLOO)
    return ProcessGroup(meeting, CPU)


def in_lane(rank, size, address, folder, cases):
    """One process of a lane; its first writes what came of every case. Each has a clock of its own, all wrong."""
    torch.set_num_threads(1)
    for case in cases:
        engine, policy = lane_of(case, rank, size)
        group = met(address, case, rank, size)
        engine.meet(group)
        found = served(engine, policy, lambda seconds: seconds if rank == 0 else 60.0 - seconds)
        names = [name for name, _ in policy.network.named_parameters()]
        told = {"done": found, "sums": engine.checksums(names), "room": engine.kv_tokens}
        trained = spoiled(engine, policy, policy.trained())  # a copy that is not its part is told, whoever asks
        told["spoiled"] = engine.checksums([]) == {trained: "another part"}
        other = spoiled(engine, policy, [name for name in names if name not in policy.trained()] or names)
        told["spoiled"] &= engine.checksums([other]) == dict.fromkeys((trained, other), "another part")
        torch.save(told, folder / f"{case}-{rank}.pt")
        group.close()


def in_teams(rank, size, address, folder, cases, team):
    """One process of a lane of teams, to which requests come and from which one is taken, before and after a publish;
    each has a clock of its own. The second team is asked nothing at first."""
    torch.set_num_threads(1)
    for case in cases:
        engine, policy = lane_of(case, rank, size, team)
        group = met(address, case, rank, size)
        engine.meet(group)
        teams, found = size // team, []
        for version in (1, 2):
            early, late = requests(1, 7), requests(2, 4)
            for index, asked in enumerate([early[:2], early[2:] + late, []]):
                engine.submit([each for at, each in enumerate(asked) if rank // team == (at % teams if index else 0)])
                found += engine.abort([late[1].key]) if index == 2 else []
                while engine.links.any(bool(engine.waiting or engine.active)):
                    found += engine.step(0.0 if rank == version % 2 else 60.0)
                    if index == 1:
                        break
            if version == 1:
                publish(engine, policy)
        torch.save(
            {
                "done": [(c.key, c.tokens, c.logprobs, c.stop, c.version, c.kept) for c in found],
                "sums": engine.checksums([name for name, _ in policy.network.named_parameters()]),
            },
            folder / f"{case}-{rank}.pt",
        )
        group.close()


@torch.no_grad()
def spoiled(engine, policy, names):
    """Changes the first of some parameters of which a process has a part."""
    full, held = (dict(each.network.named_parameters()) for each in (policy, engine.policy))
    name = next(name for name in names if held[name].shape != full[name].shape)
    held[name].view(-1)[0] += 1
    return name


def in_broken_lane(rank, size, address, folder, how):
    """One process of a lane whose last one is lost in the middle: killed, stopped, or it has left because something
    failed. The others write what they say; only of one that is stopped they learn by waiting."""
    torch.set_num_threads(1)
    engine, _ = lane_of("full", rank, size)
    group = met(address, how, rank, size, seconds=3.0 if how == "stopped" else 300.0)
    engine.meet(group)
    engine.submit(requests(1, 7))
    engine.step(0.0)
    if rank == size - 1:
        if how == "left":
            engine.part_from_others()
            group.close()
            time.sleep(300)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    try:
        engine.step(60.0)
    except Exception as error:
        (folder / f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)  # as one whose group is gone; nothing is torn down in turn
