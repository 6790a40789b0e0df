"""Every rule of the first tier: a recipe that is right becomes wrong by a change, and one problem says so."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.api.recipes import PROBES
from stretto.checks.recipe import RULES, checked_recipe, examine
from stretto.checks.rules import rows
from stretto.checks.rules.base import CheckContext
from stretto.checks.rules.served import server_can_be_used
from stretto.checks.rules.vllm import engine_apart_can_do_it
from stretto.errors import RecipeError
from stretto.recipe.load import read_recipe
from stretto.recipe.resolve import resolve
from stretto.recipe.schema import Adapter, ModelSection, Recipe, VllmEngineSection
from stretto.types import Prompt

LETTERS = ["task.source.alphabet=ab", "task.source.count=30", "model.scratch.characters='ab='"]
PPO = ["algorithm.name=ppo"]
TAUGHT = ["algorithm={name: distill}", "roles.teacher.name=causal"]
ADDED = ["algorithm={name: distill, reward_weight: 0.5}", "roles.teacher.name=causal"]
MODEL = "rewards=[{name: accuracy, kind: exact}, {name: quality, kind: model}]"
TWICE = "rewards=[{name: a, kind: model}, {name: b, kind: model}, {kind: exact}]"


def cells(generate, train, more=""):
    """A generate and a train cell on CPU devices of these numbers."""
    names = [", ".join(f"localhost/cpu:{number}" for number in told.split(", ")) for told in (generate, train)]
    told = f"{{role: generate, devices: [{names[0]}]}}, {{role: train, devices: [{names[1]}]{more}}}"
    return f"placement={{cluster: 4xcpu, strategy: separate, cells: [{told}]}}"


NARROW = [cells("0", "1, 2", ", mesh: {tp: 2}"), "optimizer.name=adamw8bit", "model.scratch.heads=4"]
LANE = cells("0, 1", "2").replace("}, {role: train", ", mesh: {tp: 2}}, {role: train")
SLEEPER = cells("0, 1", "0, 1", ", sleeps: [generate]").replace("}, {role: train", ", mesh: {tp: 2}}, {role: train")
SLEEPER = SLEEPER.replace("strategy: separate", "strategy: flatten").replace("4xcpu", "2xcpu")
HOSTS = LANE.replace("4xcpu", "2x2xcpu").replace("cpu:1", "cpu:0").replace("cpu:2", "cpu:1")
HOSTS = HOSTS.replace("localhost", "host0", 1).replace("localhost", "host1")
EXACT = "algorithm={name: distill, top_k: 2}"
SLICES = cells("0", "0, 1", "}, {role: reference, devices: [localhost/cpu:1]").replace("4xcpu", "2xcpu")
SOURCE = "task={source: {kind: synthetic, name: %s}, prompt: '1', holdout: {prompts: 10}}"
GAMES = [SOURCE % "number", "environment={kind: game}"]
CODES = [SOURCE % "code"]
LOOKUP = [SOURCE % "lookup"]
MEMORY = [*LOOKUP, "environment={kind: memory}"]
TASKSET = "task={source: {kind: verifiers, taskset: textarena, config: {game: Wordle-v0}}}"
PLAYS, PAYS = ["environment={kind: verifiers}"], ["rewards=[{kind: signal}]"]
COUNTS = "rewards=[{kind: signal, signal: turns}]"

WRONG = [
    (["model.quantize=nf4", "model.adapter=null"], "model.quantize", "frozen base"),
    (["model.dtype=float16"], "model.dtype", "loss scaling"),
    (["algorithm.name=astar_po", "batch.samples=1"], "algorithm.vstar.table", "there is no table of V*"),
    (["algorithm={name: astar_po, vstar: {table: none.jsonl}}"], "algorithm.vstar.table", "none.jsonl)"),
    ([*NARROW, "model.scratch.width=144"], "optimizer.name", "o_proj is cut into pieces of 72 numbers, and 144 share"),
    (
        [*NARROW, "model.scratch.width=144", "model.adapter={rank: 64, targets: [down_proj, o_proj]}"],
        "optimizer.name",
        "o_proj is cut into pieces of 72 numbers",
    ),
    (["model.shape=qwen3-32b"], "model.shape", "only planned with"),
    (["model={name: sized, shape: qwen3-32b}"], "model.shape", "differs from the files of sized: layers 64 for 2"),
    (["model={name: causal, shape: qwen3-33b}"], "model.shape", "no model is known as"),
    (["roles.critic.name=scratch"], "roles.critic", "which has no critic"),
    ([*PPO, "roles.critic={}"], "roles.critic.name", "nothing to load"),
    ([*PPO, "roles.critic.shape=llama-7b"], "roles.critic.shape", "only planned with"),
    ([*PPO, "roles.critic.name=./no"], "roles.critic.name", "there is no"),
    (
        [*PPO, "roles.critic={name: scratch, optimizer: null}", "algorithm.gae={value_clip: 0.1}"],
        "algorithm.gae.value_clip",
        "the critic is not trained",
    ),
    (
        [*PPO, "roles.critic.name=scratch", "algorithm.gae={lam: 0.9, critic_lam: 1.0, length_alpha: 0.05}"],
        "algorithm.gae.lam",
        "length_alpha says lambda of the policy",
    ),
    ([*PPO, "roles.critic={name: scratch, warmup_steps: 99999}"], "roles.critic.warmup_steps", "leave none of the run"),
    ([*PPO, "roles.critic={name: scratch, optimizer: {betas: [0.9, 1.0]}}"], "roles.critic.optimizer.betas.1", "never"),
    ([*PPO, "roles.critic={name: causal, optimizer: null}"], "roles.critic.name", "which is no token or sequence"),
    (["algorithm.kl={adaptive: {}}"], "algorithm.kl.adaptive", "is 0"),
    (["algorithm.kl={coef: 0.1, adaptive: {}}"], "algorithm.kl.adaptive", "not available yet for a KL in the loss"),
    (
        ["algorithm.kl={coef: 0.1, where: reward, adaptive: {horizon: 1}}"],
        "algorithm.kl.adaptive.horizon",
        "one step of 8 trajectories (batch.prompts x batch.samples) could take the coefficient to 0 or below",
    ),
    (["algorithm={name: distill}"], "roles.teacher", "learns from a teacher"),
    (["algorithm={name: distill}", "roles.teacher.name=adapter"], "roles.teacher.name", "adapter is an adapter of"),
    ([*PPO, "roles.critic.name=adapter"], "roles.critic.name", "adapter is an adapter of"),
    (["roles.teacher.name=causal"], "roles.teacher", "asks no teacher"),
    (
        ["algorithm={name: distill}", "roles.teacher={name: causal, prompt: 'it is {refrence}'}"],
        "roles.teacher.prompt",
        "no column 'refrence'",
    ),
    (["algorithm={name: distill}", "roles.teacher.name=two"], "roles.teacher.name", "which is no language model"),
    (
        ["algorithm={name: distill, top_k: 2}", "roles.teacher.name=causal", "engine.top_p=0.9"],
        "algorithm.top_k",
        "over the whole vocabulary",
    ),
    (["roles.reward_model.name=scratch"], "roles.reward_model", "no reward is of kind model"),
    ([MODEL], "rewards.1.kind", "roles.reward_model is null"),
    (
        [MODEL, "rewards.1.deadline=9", "roles.reward_model.name=scratch"],
        "rewards.1.deadline",
        "has no effect on kind model; it belongs to regex, math, reasoning_gym",
    ),
    ([TWICE, "roles.reward_model.name=scratch"], "rewards.1.kind", "rewards.0 is the score"),
    (["rewards.0.kind=model", "roles.reward_model.name=scratch"], "evaluate.every", "of no answer that it is right"),
    ([MODEL, "roles.reward_model.name=two"], "roles.reward_model.name", "has 2 labels, and a reward is one number"),
    ([MODEL, "roles.reward_model.name=unsaid"], "roles.reward_model.name", "has 2 labels"),
    ([MODEL, "roles.reward_model.name=causal"], "roles.reward_model.name", "LlamaForCausalLM, which is no sequence"),
    ([*PPO, "roles.critic.name=two"], "roles.critic.name", "has 2 labels, and a value is one number"),
    (["roles.reference.name=x", "algorithm.kl.coef=0.1"], "roles.reference", "not available yet"),
    (["algorithm.name=rlo"], "algorithm.name", "there is no algorithm 'rlo'"),
    (PPO, "roles.critic", "needs a critic"),
    (["algorithm.gae={lam: 1.0}"], "algorithm.gae", "has no effect on name rloo; it belongs to ppo"),
    (["algorithm.credit=turn"], "algorithm.credit", "environment single_turn says of no turn"),
    (["environment={kind: tools}", "algorithm={name: reinforce_pp, credit: turn}"], "algorithm.credit", "reinforce_pp"),
    (["environment={kind: tools, tools: [search]}"], "environment.corpus", "needs a collection of texts"),
    (["environment={kind: tools, tools: [search], corpus: none}"], "environment.corpus", "cannot be read"),
    (["environment={kind: tools, results: 5}"], "environment.results", "search is not among"),
    (["environment={kind: tools, tools: [python, python]}"], "environment.tools", "python more than once"),
    (["environment.kind=shop:Shop", "algorithm.credit=turn"], "algorithm.credit", "says of no turn"),
    (["environment.kind=shop:Shop", *PAYS], "rewards.0.signal", "no signal of environment shop:Shop; there are: turns"),
    (["environment={kind: 'shop:play', turns: 2}"], "environment.turns", "has no effect on shop:play, a function"),
    (["environment.kind=shop:Till"], "environment.kind", "reset of shop:Till asks for prices, and prompt"),
    *(
        ([*more, "rewards=[{kind: signal, signal: rewrd}]"], "rewards.0.signal", f"no signal of environment {kind}")
        for kind, more in (("tools", ["environment={kind: tools}"]), ("game", GAMES), ("memory", MEMORY))
    ),
    (
        ["rewards=[{kind: exact}, {name: short, kind: lcpo_max, target: budgett}]"],
        "rewards.1.target",
        "in a column 'budgett'",
    ),
    (["environment={kind: game, range: [0, 3]}"], "task.source", "is no secret of this game"),
    ([*CODES, "environment={kind: game, game: code, length: 3}"], "task.source", "no secret of this game"),
    ([*GAMES, "environment.alphabet=ab"], "environment.alphabet", "belongs to"),
    ([*GAMES, "task.source.range=[3, 3]"], "task.source.range", "nothing to guess"),
    (["environment={kind: memory}"], "environment.document", "has no text in a column"),
    ([*MEMORY, "environment.shown=0.5", "model.scratch.warmup_steps=0"], "environment.shown", "and there is none"),
    ([*MEMORY, "environment.shown=0.5", "model.scratch.demonstration=['1']"], "environment.shown", "what is shown"),
    (["environment={kind: project}"], "environment.files", "has no list of files"),
    (["environment={kind: program, command: [no-such-agent]}"], "environment.command", "no program in the recipe's"),
    (["environment={kind: program, command: [python, -u, gone.py]}"], "environment.command", "there is no gone.py"),
    (["environment={kind: program, command: []}"], "environment.command", "at least 1"),
    (["environment.kind=verifiers"], "environment.kind", "plays tasksets, and task.source.kind is synthetic"),
    ([TASKSET, "environment={kind: tools}", COUNTS], "environment.kind", "only verifiers plays and judges"),
    ([TASKSET, *PLAYS, *PAYS, "task.prompt='?'"], "task.prompt", "write their own messages"),
    ([TASKSET, *PLAYS, *PAYS, "task.source.config={id: x}"], "task.source.config.id", "given by task.source.taskset"),
    ([TASKSET, *PLAYS, *PAYS, "task.source.count=999999"], "task.source.count", "too many"),
    (["task={source: {kind: verifiers, taskset: nope}}", *PLAYS, *PAYS], "task.source.taskset", "there is no taskset"),
    (PAYS, "rewards.0.signal", "no signal of environment single_turn; there are: tokens, truncated"),
    ([*LOOKUP, "environment={kind: memory, answer: '{question}'}"], "environment.answer", "{memory}"),
    ([*LOOKUP, "environment={kind: memory, update: '{memory}'}"], "environment.update", "{chunk}"),
    (["algorithm.vstar={}"], "algorithm.vstar", "it belongs to astar_po, astar_po_course"),
    (["algorithm={name: astar_po, kl: {coef: 0.1}}"], "algorithm.kl.coef", "beta2"),
    (["algorithm={name: astar_po, correction: {kind: token}}"], "algorithm.correction.kind", "any policy"),
    (["algorithm.name=astar_po", "roles.reference=null"], "roles.reference", "needs a reference"),
    (["algorithm={name: astar_po_course, vstar: {beta1: 0.1}}"], "algorithm.vstar.beta1", "largest reward"),
    (["batch.oversample=1.5"], "batch.oversample", "has no effect"),
    (["batch.lengths={response: {cap: 4000}}"], "batch.lengths.response.cap", "above engine.max_new_tokens"),
    (["batch.lengths={response: {mean: 5, cap: 4}}"], "batch.lengths.response", "above the cap of 4"),
    (["batch.lengths={from_run: runs/none}"], "batch.lengths.from_run", "no folder of a run"),
    ([f"batch.lengths={{from_run: {'x' * 300}}}"], "batch.lengths.from_run", "no folder of a run"),
    (["engine.kind=vllm", "model.dtype=float64"], "model.dtype", "does not compute in float64"),
    (["engine={kind: vllm, speculate: false}"], "engine.speculate", "no effect on vllm"),
    (["engine={kind: vllm, arguments: {max_num_seq: 4}}"], "engine.arguments.max_num_seq", "is no argument of vLLM"),
    (
        ["engine={kind: vllm, arguments: {max_num_seqs: many}}"],
        "engine.arguments.max_num_seqs",
        "is not a whole",
    ),
    (
        ["engine={kind: vllm, arguments: {enforce_eager: 1}}"],
        "engine.arguments.enforce_eager",
        "is not true or",
    ),
    (["engine={kind: vllm, arguments: {max_model_len: 99}}"], "engine.arguments.max_model_len", "the model's context"),
    (["engine={kind: vllm, top_p: 0.9}"], "engine.top_p", "another distribution"),
    (["engine={kind: 'file_engine:make', top_p: 0.9}"], "engine.top_p", "another distribution"),
    (["task.template={enable_thinking: false}"], "task.template", "no effect on a scratch model"),
    (["task.chat_template=none.jinja"], "task.chat_template", "no effect on a scratch model"),
    ([EXACT, "roles.teacher.name=causal", SLICES], "algorithm.top_k", "in slices is not available yet"),
    (["rewards=[{kind: kimi}]", "evaluate.every=0"], "rewards.0.kind", "no other part judges"),
    (["engine.graphs=true", "placement.cluster=1xcpu"], "engine.graphs", "names none"),
    (["placement={nccl: true, cluster: 2xcpu}"], "placement.nccl", "names none"),
    (["optimizer.reduce=bfloat16", "model.dtype=float64"], "optimizer.reduce", "no sense beside weights in float64"),
    (["optimizer.reduce=bfloat16", "placement.cluster=1xcpu"], "optimizer.reduce", "no effect on one device"),
    (["engine.memory_share=0"], "engine.memory_share", "no memory"),
    (["engine.python=/usr/bin/python"], "engine.python", "it belongs to vllm"),
    (["engine.url=http://x"], "engine.url", "it belongs to vllm, sglang"),
    (["optimizer.name=adamw8bit", "model.dtype=float64"], "optimizer.name", "no sense beside weights in float64"),
    (["placement.strategy=elastc"], "placement.strategy", "there is no strategy 'elastc'"),
    (["placement.strategy=elastic"], "placement.strategy", "no effect on one device"),
    (["placement.strategy=separate"], "placement.strategy", "needs two devices, and there is one"),
    (["placement.fractions=[1, 1]"], "placement.fractions", "no effect with the strategy auto"),
    (["placement.staleness=1"], "placement.staleness", "needs devices that only generate"),
    (["placement.staleness=2"], "placement.staleness", "not possible"),
    (
        ["placement={staleness: 1, cluster: 2xcpu, strategy: separate}", "algorithm={name: astar_po}"],
        "placement.staleness",
        "needs importance weights",
    ),
    (
        ["placement={staleness: 1, cluster: 2xcpu, strategy: separate}", "algorithm.correction.kind=none"],
        "algorithm.correction.kind",
        "older weights",
    ),
    (["placement={staleness: 1, cluster: 2xcpu, strategy: elastic}"], "placement.staleness", "shares its own with"),
    (
        ["placement.cells=[{role: train, devices: [localhost/gpu:0]}]"],
        "placement.cells",
        "no cell serves the stage generate",
    ),
    ([cells("0, 1", "2")], "placement.cells", "share every matrix"),
    ([cells("0", "1, 2", ", mesh: {pp: 2}")], "placement.cells", "pipelines (pp) are not available yet"),
    ([cells("0", "0, 1, 2, 3", ", mesh: {tp: 4, ep: 2}")], "placement.cells", "ep 2 is no multiple"),
    (["deadlines.environment=5"], "deadlines.environment", "not available yet"),
    (["placement.cluster=cpus"], "placement.cluster", "'cpus' is no cluster"),
    (["placement.cluster=8xH1000"], "placement.cluster", "no device is known as 'H1000'"),
    (["environment.kind=mine:run"], "environment.kind", "there is no module 'mine'"),
    (["algorithm.name=mine:build"], "algorithm.name", "there is no module 'mine'"),
    (["task.source={kind: 'mine:rows'}"], "task.source.kind", "there is no module 'mine'"),
    (["engine.kind=mine:make"], "engine.kind", "there is no module 'mine'"),
    (["log=[mine:Logger]"], "log", "there is no module 'mine'"),
    (["environment.kind=singel_turn"], "environment.kind", "there is no environment"),
    (["task.source={kind: hf}"], "task.source.name", "needs a dataset"),
    (["task.source={kind: hf, path: x}"], "task.source.path", "no file or folder"),
    (["task.source={kind: reasoning_gym}", "task.prompt=null"], "task.source.name", "kind reasoning_gym needs it"),
    (
        ["task.source={kind: reasoning_gym, name: chain_sum, count: 10}", "task.prompt=null"],
        "task.holdout.prompts",
        "leaves none to train on",
    ),
    (["task.source.split=x"], "task.source.split", "no effect"),
    (["task.source.subset=x"], "task.source.subset", "no effect"),
    (["task.source.config={a: 1}"], "task.source.config", "no effect"),
    (["task.source.seed=1"], "task.source.seed", "no effect"),
    (["rewards.0.kind=reasoning_gym"], "rewards.0.kind", "no scorer of reasoning-gym"),
    (["rewards.0={kind: math, pick: first}"], "rewards.0.pick", "no effect"),
    (["rewards.0={kind: arc}"], "rewards.0.kind", "no grids"),
    (["rewards.0={kind: code}"], "rewards.0.tests", "there is no column 'tests', in the prompt"),
    (["task.source={kind: arc, name: x}"], "task.source.name", "arc-agi-1"),
    (["log=[wandb]"], "log", "needs the package wandb, which is not installed"),
    (["algorithm.kl.estimator=k1"], "algorithm.kl.estimator", "no effect while algorithm.kl.coef is 0"),
    (["algorithm.kl.where=reward"], "algorithm.kl.where", "no effect"),
    (["algorithm.kl.estimator=k3"], "algorithm.kl.estimator", "no effect while algorithm.kl.coef is 0"),
    *(
        (
            [f"algorithm={{name: {name}, kl: {{coef: 0.1, estimator: {estimator}, where: reward}}}}"],
            "algorithm.kl.estimator",
            f"{estimator} in the reward does not pull towards the reference",
        )
        for name in ("grpo", "reinforce_pp")
        for estimator in ("k2", "k3")
    ),
    (["roles.reference=null"], "roles.reference", "no effect"),
    (["algorithm.correction={kind: none, cap: 3}"], "algorithm.correction.cap", "no effect"),
    (["batch.max_rounds=3"], "batch.max_rounds", "no effect"),
    (["model.scratch.warmup_steps=0", "model.scratch.warmup_lr=0.1"], "model.scratch.warmup_lr", "no effect"),
    (["task.source.max=3"], "task.source.max", "no effect"),
    (["task.source.path=x"], "task.source.path", "no effect"),
    (["rewards.0.pattern=x"], "rewards.0.pattern", "no effect"),
    (["rewards.0.compare=numeric"], "rewards.0.compare", "no effect"),
    (["rewards.0.deadline=9"], "rewards.0.deadline", "no effect"),
    (["evaluate={every: 0}", "task.holdout={prompts: 0, seed: 1}"], "task.holdout.seed", "no effect"),
    (["rewards.0.pick=first"], "rewards.0.pick", "no effect"),
    (["checkpoint.best=eval/accuracy", "evaluate.every=0"], "checkpoint.best", "never measured"),
    (["checkpoint.best=eval/acuracy"], "checkpoint.best", "no metric"),
    (["checkpoint.best=reward/part/format"], "checkpoint.best", "no metric"),
    (["checkpoint.best=eval/loss"], "checkpoint.best", "eval/loss is not measured where algorithm.name is rloo"),
    (["checkpoint.best=eval/brier"], "checkpoint.best", "eval/brier is not measured"),
    (["checkpoint.best=kl/reference"], "checkpoint.best", "kl/reference is not measured"),
    (
        ["guards={stop_on: [loop_lag, entropy_collapse], entropy_collapse: null}"],
        "guards.stop_on",
        "entropy_collapse has no effect, because guards.entropy_collapse is null",
    ),
    (["batch.samples=1"], "batch.samples", "too few for rloo"),
    (["batch.updates=9"], "batch.updates", "9 updates cannot share 8 trajectories"),
    (["batch.token_budget=24"], "batch.token_budget", "cannot hold"),
    (["batch.prompts=1000000"], "batch.samples", "more than can be held"),
    (["evaluate.pass_k=1000000"], "evaluate.pass_k", "more than can be held"),
    (["run.until=06:30"], "run.until", "has no time zone"),
    (["run.until=2000-01-01T00:00Z"], "run.until", "is over"),
    (["run.until=9999999999d"], "run.until", "farther away than any calendar goes"),
    (["optimizer.warmup=10"], "optimizer.warmup", "leave none of the run's 10"),
    (["optimizer.betas=[0.9, 1]"], "optimizer.betas.1", "never change"),
    (["optimizer.lr=1e4"], "optimizer.lr", "moves every weight"),
    (["optimizer.lr=1.01"], "optimizer.lr", "moves every weight"),
    (["algorithm.kl.coef=1e4"], "algorithm.kl.coef", "nothing of the reward"),
    (["engine.temperature=1e-3"], "engine.temperature", "leaves nothing"),
    (["model.adapter={targets: []}", "model.adapter.rank=4"], "model.adapter.targets", "no layer"),
    (["model.adapter.rank=17"], "model.adapter.rank", "above 16"),
    (["model.scratch.width=18"], "model.scratch.width", "even share"),
    (["model.scratch.width=80000"], "model.scratch", "million parameters"),
    (["model.scratch.context=100000"], "model.scratch.context", "too many"),
    (["model.scratch.context=24", "engine.max_new_tokens=24"], "model.scratch.context", "cannot hold"),
    (["task.holdout.prompts=0"], "task.holdout.prompts", "no prompts are held out"),
    (["evaluate.prompts=11"], "evaluate.prompts", "more than the 10"),
    (["evaluate={every: 0, prompts: 11}"], "evaluate.prompts", "more than the 10"),
    (["roles.reference=null", "algorithm.kl.coef=0.1"], "roles.reference", "is null, but"),
    (["seed=-1"], "seed", "negative"),
    (["task.holdout.seed=-1"], "task.holdout.seed", "negative"),
    (["checkpoint.keep=3000000000"], "checkpoint.keep", "larger than anything"),
    (["rewards.0.kind=exct"], "rewards.0.kind", "exct"),
    (["rewards.0={name: a, kind: regex}"], "rewards.0.pattern", "kind regex needs it"),
    (["rewards.0={name: a, kind: regex, pattern: '('}"], "rewards.0.pattern", "no regular expression"),
    (["rewards.0.kind=no_such_module:f"], "rewards.0.kind", "no_such_module"),
    (["rewards.0.kind='a b:f'"], "rewards.0.kind", "module:name"),
    (["rewards=[{kind: exact}, {kind: exact}]"], "rewards.1.name", "accuracy"),
    (["rewards.0.weight=0"], "rewards", "every weight is 0"),
    (
        ["rewards.0.kind=numeric", "task.source.alphabet=ab", "model.scratch.characters='ab='"],
        "rewards.0.kind",
        "no number",
    ),
    (
        [
            "rewards.0={kind: regex, pattern: x, compare: numeric}",
            "task.source.alphabet=ab",
            "model.scratch.characters='ab='",
        ],
        "rewards.0.compare",
        "no number",
    ),
    (["rewards=[{kind: overlong}]", "evaluate.every=2"], "evaluate.every", "a length says of no answer"),
    (["model.scratch.characters='0123456789'"], "model.scratch.characters", "does not have '='"),
    (["task.source.alphabet='01x'"], "model.scratch.characters", "does not have 'x'"),
    (["task.prompt=null"], "model.scratch.characters", "does not have"),
    ([*TAUGHT, "rewards=[]"], "evaluate.every", "without rewards nobody says of an answer that it is right"),
    ([*TAUGHT, "rewards=[]", "evaluate={pass_k: 3}"], "evaluate.pass_k", "a teacher judges no answer"),
    ([*TAUGHT, "rewards=[]", "evaluate={}", "checkpoint.best=reward/mean"], "checkpoint.best", "is not measured"),
    ([*ADDED, "rewards=[]"], "rewards", "algorithm.reward_weight is 0.5"),
    ([*ADDED, "rewards.0.weight=0"], "rewards", "algorithm.reward_weight adds nothing"),
    (["task.source.count=10"], "task.holdout.prompts", "leaves none to train on"),
    (["task.source.name=revers"], "task.source.name", "revers"),
    (["task.prompt='{txt}='"], "task.prompt", "txt"),
    (["model={name: nothing at all}"], "model.name", "no model"),
    (["run.folder=taken"], "run.folder", "exists already"),
    (["run.folder=file/run"], "run.folder", "cannot be written"),
    (["run.folder=/proc/run"], "run.folder", "cannot be written"),
    (["run.folder=~/run"], "run.folder", "~ is not read"),
]

CLASSIFIERS = {
    "two": {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}},
    "unsaid": {"architectures": ["LlamaForSequenceClassification"]},
    "causal": {"architectures": ["LlamaForCausalLM"]},
    "sized": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 99,
    },
    "one": {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
}
"""Folder -> what its configuration says."""


def problems(data, changes=(), root=None, probes=PROBES):
    return list(examine(data, changes, root=root or Path.cwd(), probes=probes)[1])


@pytest.fixture
def taken(right, tmp_path):
    """The right recipe in a folder where something is in the way."""
    (tmp_path / "taken").mkdir()
    for name, facts in CLASSIFIERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", **facts}))
    (tmp_path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "causal"), "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**adapter, "target_modules": ["q_proj"]}))
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    (tmp_path / "file").touch()
    (tmp_path / "agent.py").touch()
    words = '"""Looks.\n\n        Args:\n            thing: It.\n        """'
    tool = f"    def price(self, thing: str) -> str:\n        {words}\n"
    reset = "    def reset(self, answer, prices, tax=1): ...\n"
    (tmp_path / "shop.py").write_text(
        f"class Shop:\n{tool}class Till:\n{reset}{tool}async def play(prompt, model): ...\n"
    )
    (tmp_path / "file_engine.py").write_text("def make(policy): ...\n")
    return right


def test_the_recipe_that_is_made_wrong_is_right(right):
    assert problems(right) == []


@pytest.mark.parametrize(("changes", "field", "reason"), WRONG)
def test_what_is_wrong_is_one_problem_with_a_fix(taken, changes, field, reason):
    others = ["algorithm.vstar.table"] if field != "algorithm.vstar.table" else []  # which nothing has made here
    (problem,) = [problem for problem in problems(taken, changes) if problem.field not in others]
    assert problem.field == field
    assert reason in problem.reason
    assert problem.fix


@pytest.mark.parametrize(
    ("engine", "field", "reason"),
    [
        ("kind=file_engine:make", "placement.cells", "on several devices together is not available yet"),
        ("graphs=true", "engine.graphs", "steps of devices that generate together are not recorded"),
    ],
)
def test_what_an_engine_cannot_do_on_several_devices_is_told_beside_what_this_machine_lacks(
    taken, engine, field, reason
):
    found = problems(taken, [LANE, f"engine.{engine}"])
    assert [problem.fix for problem in found if problem.field == field and reason in problem.reason]


@pytest.mark.parametrize(
    ("lane", "told"),
    [
        (LANE, None),
        (LANE.replace("tp: 2", "dp_shard: 2"), "devices on which vLLM generates share every matrix"),
        (SLEEPER, "does not take turns with train, which sleeps on them"),
        (HOSTS, "vLLM generates on devices of one host, and these are on 2"),
    ],
    ids=["right", "slices", "sleeps", "hosts"],
)
def test_vllm_generates_on_several_devices_of_one_host_that_share_every_matrix(taken, lane, told):
    found = [problem for problem in problems(taken, [lane, "engine.kind=vllm"]) if problem.field == "placement.cells"]
    assert [told in problem.reason for problem in found] == [True] * (told is not None)


RIGHT = [
    [],
    ["engine={kind: vllm, stop: ['x'], python: none, arguments: {max_num_seqs: 4, cudagraph_capture_sizes: [1, 2]}}"],
    [LANE],
    [*PPO, "roles.critic.name=scratch", "algorithm.gae={lam: 1.0}"],
    [*PPO, "roles.critic={name: causal, adapter: {rank: 4}}", "algorithm.kl={coef: 0.1, where: reward, adaptive: {}}"],
    ["algorithm={name: distill, top_k: 2}", "roles.teacher.name=causal"],
    [*TAUGHT, "rewards=[]", "evaluate={}"],
    [*TAUGHT, "rewards=[]", "evaluate={}", "checkpoint.best=kl/reference"],
    [*TAUGHT, "rewards.0.weight=0"],
    [MODEL, "roles.reward_model.name=scratch"],
    ["rewards.0.kind=model", "roles.reward_model.name=scratch", "evaluate.every=0"],
    [MODEL, "roles.reward_model.name=one"],
    ["algorithm.name=reinforce", "batch.samples=1"],
    ["algorithm.name=grpo", "algorithm.clip=[0.1, 0.3]", "batch.updates=4"],
    ["algorithm.kl={coef: 0.1, estimator: k3}"],
    ["algorithm.kl={coef: 0.1, where: reward}"],
    ["algorithm.kl={coef: 0.1, estimator: k1, where: reward, adaptive: {horizon: 2}}"],
    ["algorithm.kl={coef: 0.1, estimator: auto, where: reward}"],
    ["algorithm.kl.estimator=auto"],
    ["algorithm.kl.estimator=k2"],  # what auto is: recipes that were written down name it
    ["algorithm.correction.kind=none"],
    ["algorithm.correction.cap=5"],
    ["model.adapter={rank: 4, alpha: 8}"],
    ["model.scratch.warmup_steps=0"],
    ["model.scratch=null", "task={source: {name: addition}, prompt: '{a}+{b}='}"],
    ["placement={strategy: flatten, cluster: 1xcpu}"],
    ["placement.cluster=1xgpu"],
    ["engine={speculate: false, memory_share: 0.5}"],
    ["engine.graphs=true"],  # one of the devices there may be a GPU
    ["placement.nccl=true"],
    ["optimizer.reduce=bfloat16", "placement.cluster=2xcpu"],
    ["checkpoint.best=loss"],
    ["batch.token_budget=4096"],
    ["evaluate.every=0"],
    ["evaluate={every: 0}", "task.holdout.prompts=0"],
    ["evaluate.every=0", "checkpoint.best=reward/mean"],
    ["checkpoint.best=reward/part/accuracy"],
    ["checkpoint.best=null", "checkpoint.every=1000"],
    ["rewards=[{kind: exact}, {name: b, kind: numeric, weight: 0, pick: only}]"],
    ["rewards.0={kind: regex, pattern: '(.*)', compare: numeric, pick: first}"],
    ["log=[]"],
    ["rewards.0.kind=math"],
    ["rewards.0={kind: math, deadline: 20}"],
    ["run.folder=new/deep/folder"],
    ["environment={kind: tools, turns: 2}"],
    ["environment={kind: program, command: [python, agent.py]}"],
    [TASKSET, "environment={kind: verifiers, turns: 4}", *PAYS],
    ["rewards.0={kind: signal, signal: tokens}"],
    ["environment={kind: tools}", "algorithm.credit=turn"],
    [*GAMES, "algorithm={name: multi_conv, credit: turn, average: trajectory}"],
    [*CODES, "environment={kind: game, game: code}"],
    [*LOOKUP, "environment={kind: memory, chunk: 8, keep: false}", "algorithm.name=multi_conv"],
    ["optimizer={schedule: cosine, warmup: 9, clip: null}"],
]


@pytest.mark.parametrize("changes", RIGHT)
def test_what_makes_sense_is_accepted(taken, changes):
    assert problems(taken, changes) == []


def test_all_problems_come_at_once(taken):
    changes = ["seed=-1", "algorithm.name=gpro", "batch.updates=99", "run.folder=taken", "rewards.0.kind=exct"]
    changes += ["engine.temperature=1000", "model.scratch.width=17", "model.scratch.characters=ab"]
    assert {problem.field for problem in problems(taken, changes)} == {
        "seed",
        "algorithm.name",
        "batch.updates",
        "run.folder",
        "rewards.0.kind",
        "engine.temperature",
        "model.scratch.width",
        "model.scratch.characters",
    }


def test_a_scratch_section_has_no_effect_on_another_model(right, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 24}')
    found = problems(right, ["model.name=model"])
    assert [problem.field for problem in found] == ["model.scratch", "engine.max_new_tokens"]
    assert problems(right, ["model.scratch=null", "engine.max_new_tokens=23"]) == []


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("clip: [0.1, 0.1]", "does not clip"),
        ("constant: 3", "divides by counts alone"),
        ("vstar: {}", "reads no table"),
        ("gae: {}", "has no critic"),
    ],
)
def test_what_an_algorithm_of_one_s_own_does_not_read_is_in_its_file(right, tmp_path, key, reason):
    (tmp_path / "mine.py").write_text("FACTS = AlgorithmFacts(clip=None)\n\n\ndef build(section): ...\n")
    (problem,) = problems(right, [f"algorithm={{name: 'mine:build', {key}}}"])
    assert problem.field == f"algorithm.{key.partition(':')[0]}"
    assert reason in problem.reason


def test_an_algorithm_that_drops_groups_may_say_how_often_it_resamples(right, tmp_path):
    (tmp_path / "mine.py").write_text("FACTS = AlgorithmFacts(drops=True)\n\n\ndef build(section): ...\n")
    assert problems(right, ["algorithm.name=mine:build", "batch.max_rounds=3"]) == []


def test_tensorboard_must_be_installed_to_be_logged_to(right, monkeypatch):
    monkeypatch.setattr("stretto.checks.rules.files.importlib.util.find_spec", lambda name: None)
    (problem,) = problems(right)
    assert problem.field == "log"
    assert "pip install tensorboard" in problem.fix


@pytest.mark.parametrize(("answer", "told"), [("3 or 4", "holds 2 numbers"), ("²", "holds no number")])
def test_a_numeric_reward_needs_one_number_to_compare_with(right, answer, told):
    prompt = Prompt(id="p", messages=({"role": "user", "content": "1"},), reference=answer)
    probes = dataclasses.replace(PROBES, task=lambda *_: ([prompt] * 11, [], False))
    found = {problem.field: problem.reason for problem in problems(right, ["rewards.0.kind=numeric"], probes=probes)}
    assert told in found["rewards.0.kind"]


def test_an_answer_that_is_missing_is_the_task_s_fault(right, tmp_path):
    prompt = Prompt(id="p", messages=({"role": "user", "content": "1"},))
    probes = dataclasses.replace(PROBES, task=lambda *_: ([prompt] * 11, [], False))
    for changes in ([], ["rewards.0.kind=numeric"], ["rewards.0.kind=math"], ["rewards.0={kind: regex, pattern: x}"]):
        (problem,) = problems(right, changes, probes=probes)
        assert problem.field == "rewards.0.kind"
        assert "the prompt 'p' ('1') has none" in problem.reason
    (tmp_path / "own.py").write_text("def reward(answer, prompt, signals): return 1.0")
    assert problems(right, ["rewards.0={kind: 'own:reward'}"], probes=probes) == []


def test_data_is_looked_for_beside_the_recipe(right, tmp_path):
    beside = tmp_path / "beside"
    beside.mkdir()
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(20)]
    (beside / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (beside / "own.py").write_text("def reward(answer, prompt, signals): return 1.0")
    changes = ["task={source: {kind: jsonl, path: data.jsonl}, holdout: {prompts: 10}}", "rewards.0.kind=own:reward"]
    assert problems(right, changes, root=beside) == []
    assert {problem.field for problem in problems(right, changes)} == {"task.source.path", "rewards.0.kind"}


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_a_file_is_examined_whole_even_if_some_keys_cannot_be_read(right, tmp_path):
    right["batch"]["sampels"] = 3
    right["algorithm"]["name"] = "gpro"
    right["optimizer"] = {"lr": "fast"}
    recipe, found = examine(write(tmp_path / "r.yaml", right), ["seed=-1"], root=tmp_path, probes=PROBES)
    assert recipe is not None
    assert [problem.field for problem in found] == ["algorithm.name", "batch.sampels", "optimizer.lr", "seed"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (["task.holdout.prompts=many"], ["task.holdout.prompts"]),
        (["evaluate.prompts=200", "task.holdout.promts=200"], ["task.holdout.promts"]),
        (["task.source.kind=synthtic", "task.source.path=x"], ["task.source.kind"]),
        (["task.source.count=x", "task.source.length=x"], ["task.source.length", "task.source.count"]),
        (["model.scratch.heads=x", "model.scratch.width=18"], ["model.scratch.heads"]),
        (["run=null"], ["run"]),
        (["rewards.0.kind=3", "rewards.0.pattern=x"], ["rewards.0.kind"]),
        (["model=null"], ["model"]),
    ],
)
def test_nothing_is_said_about_values_that_nobody_gave(right, tmp_path, changes, fields):
    _, found = examine(write(tmp_path / "r.yaml", right), changes, root=tmp_path, probes=PROBES)
    assert [problem.field for problem in found] == fields


def test_a_checked_recipe_is_resolved(right, tmp_path):
    path = write(tmp_path / "r.yaml", right)
    assert checked_recipe(path, root=tmp_path, probes=PROBES).algorithm.clip == (0.2, 0.2)
    with pytest.raises(RecipeError, match="negative"):
        checked_recipe(path, ["seed=-1"], root=tmp_path, probes=PROBES)


@pytest.mark.parametrize("best", ["kl/reference", "reward/outcome", "loss", "eval/low"])
def test_a_metric_that_is_measured_may_choose_the_best_checkpoint(right, best):
    assert problems(right, [f"checkpoint.best={best}", "algorithm.kl.coef=0.1"]) == []


def test_who_only_asks_a_model_needs_nothing_that_a_training_reads_or_writes(taken):
    changes = [
        "run={steps: 10, folder: taken, until: '2000-01-01T00:00Z'}",
        "log=[wandb]",
        "batch={prompts: 2, samples: 4, token_budget: 24, lengths: {from_run: runs/none}}",
    ]
    assert {found.field for found in problems(taken, changes)} == {
        "run.folder",
        "run.until",
        "log",
        "batch.lengths.from_run",
        "batch.token_budget",
    }
    assert examine(taken, changes, root=Path.cwd(), probes=PROBES, training=False)[1] == ()
    shorter = "batch.lengths={from_run: null, response: {cap: 64}}"
    assert examine(taken, [*changes, shorter], root=Path.cwd(), probes=PROBES, training=False)[1] == ()
    for more in ([TASKSET, "rewards=[{kind: overlong}]", "evaluate.every=0"], ["algorithm.credit=turn"]):
        asked = [*changes, *more]
        assert examine(taken, asked, root=Path.cwd(), probes=PROBES, training=False)[1] == (), "and in a single turn"
    wrong = [*changes, "run.until=soon"]
    assert [found.field for found in examine(taken, wrong, root=Path.cwd(), probes=PROBES, training=False)[1]] == [
        "run.until"
    ]


def test_every_rule_says_something_somewhere(taken, monkeypatch):
    """The cases above break every rule, except those that have a test of their own."""
    silent = {rule.__name__ for rule in RULES}
    for changes, _, _ in WRONG:
        recipe = read_recipe(json.loads(json.dumps(taken)), changes).recipe
        prompts, _, complete = PROBES.task(recipe.task, Path.cwd(), 11)
        scene = CheckContext(root=Path.cwd(), probes=PROBES, prompts=tuple(prompts), complete=complete)
        silent -= {rule.__name__ for rule in RULES if list(rule(resolve(recipe), scene))}
    of_rows = {rule.__name__ for rule in RULES if rule.__module__ == rows.__name__}  # test_rows.py
    assert silent - of_rows == {
        "adapter_can_go_on",  # needs a folder with an adapter
        "functions_are_there",
        "hosts_can_import",  # of a function that was given: tests/api/test_calls.py
        "logs_can_be_written",
        "own_algorithm_reads_them",
        "server_can_be_used",  # needs a folder that a server has read: below
        "strategy_exists",
    }


def test_vllm_has_room_for_adapters_up_to_a_rank_and_for_none_on_experts(tmp_path):
    scene = CheckContext(root=tmp_path, probes=PROBES, prompts=(), complete=True)
    recipe = Recipe(model=ModelSection(name="some/model", adapter=Adapter(rank=513)), engine=VllmEngineSection())
    (problem,) = engine_apart_can_do_it(recipe, scene)
    assert problem.field == "model.adapter.rank" and "512 is the highest" in problem.reason
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 4}')
    recipe = Recipe(model=ModelSection(name=str(tmp_path)), engine=VllmEngineSection())
    (problem,) = engine_apart_can_do_it(recipe, scene)
    assert problem.field == "model.adapter.targets" and "adapters on experts" in problem.reason
    assert not list(engine_apart_can_do_it(recipe, replace(scene, planning=True)))
    for fits in ({"adapter": None}, {"adapter": Adapter(targets="attention")}, {"quantize": "nf4"}):
        recipe = Recipe(model=ModelSection(name=str(tmp_path), **fits), engine=VllmEngineSection())
        assert not list(engine_apart_can_do_it(recipe, scene))


@pytest.mark.parametrize("url", [None, "http://x:8000"], ids=["process", "server"])
def test_vllm_samples_at_temperatures_up_to_two(tmp_path, url):
    scene = CheckContext(root=tmp_path, probes=PROBES, prompts=(), complete=True)
    engines = [VllmEngineSection(url=url, temperature=heat) for heat in (2.0, 2.1)]
    found = [list(engine_apart_can_do_it(Recipe(engine=engine), scene)) for engine in engines]
    assert [[problem.field for problem in each] for each in found] == [[], ["engine.temperature"]]


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({}, None, ""),
        ({"model.adapter": None}, "engine.url", "is sent adapters only"),
        ({"model.name": "scratch"}, "engine.url", "a model that the run makes itself"),
        ({"model.quantize": "nf4"}, "engine.url", "a base in few bits"),
        ({"placement.cluster": "2xcpu"}, "engine.url", "one device that trains, and placement names 2"),
        ({"engine.url": "http://a:b@x"}, "engine.url", "x is no address of a server"),
        ({"engine.url": "http://[x:8000"}, "engine.url", "http://[x:8000 is no address of a server"),
        ({"engine.url": "http://a..b:8000"}, "engine.url", "http://a..b:8000 is no address of a server"),
        ({"engine.url": "http://x:port"}, "engine.url", "http://x:port is no address of a server"),
        ({"engine.url": "x:8000"}, "engine.url", "x:8000 is no address of a server"),
        ({"engine.memory_share": 0.2}, "engine.memory_share", "no effect beside engine.url"),
        ({"engine.python": "p"}, "engine.python", "no effect beside engine.url"),
        ({"engine.arguments": {"enforce_eager": True}}, "engine.arguments", "no effect beside engine.url"),
    ],
)
def test_a_server_that_runs_already_is_for_adapters_of_one_device_and_was_told_what_it_is(
    tmp_path, changes, field, told
):
    sections = {"model": {"name": "some/model", "adapter": {}}, "engine": {"kind": "vllm", "url": "http://x:8000"}}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    scene = CheckContext(root=tmp_path, probes=PROBES, prompts=(), complete=True)
    kinds = ["vllm"] if field in ("engine.python", "engine.arguments") else ["vllm", "sglang"]
    for kind in kinds:
        sections["engine"]["kind"] = kind
        recipe = Recipe.model_validate(sections)
        found = [*engine_apart_can_do_it(recipe, scene), *server_can_be_used(recipe, scene)]
        assert [problem.field for problem in found] == ([field] if field else [])
        assert all(told in problem.reason for problem in found)
