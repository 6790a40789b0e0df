"""What TRL, Unsloth, verl, OpenRLHF and prime-rl call the keys of a recipe, for people who come from there.

A name that is found here is refused like any unknown key, and the refusal names ours. Nothing is translated: units
differ (epochs and steps, answers and prompts), and a recipe that was guessed at would lie. The page
`docs/guides/coming-from.md` shows the same table. Names are those of TRL 1.16, verl 0.9, OpenRLHF 0.11 with its older
flags, and prime-rl in the summer of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

PROJECTS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "prime_rl": "prime-rl"}
"""Field of a row -> what the project is called. Unsloth's own words stand with TRL's, whose trainer it uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """One thing that several projects have a name for. Names are separated by spaces."""

    ours: str | None
    """The key of a recipe; none where there is none to set."""
    told: str = ""
    """How it differs, or what to do instead."""
    trl: str = ""
    """Of TRL (with what it has from transformers) and Unsloth."""
    verl: str = ""
    """Of verl."""
    openrlhf: str = ""
    """Of OpenRLHF."""
    prime_rl: str = ""
    """Of prime-rl."""
    guesses: str = ""
    """What nobody calls it, and people try."""

    @property
    def fix(self) -> str:
        """What to write instead."""
        if self.ours is None:
            return f"take it out: {self.told}"
        return f"here it is called `{self.ours}`{f': {self.told}' if self.told else ''}"

    def names(self) -> Iterator[tuple[str, str]]:
        """(name, project) of all."""
        for field, project in PROJECTS.items():
            for name in getattr(self, field).split():
                yield name, project


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# fmt: off
MODEL = (
    Counterpart(ours="model.name", trl="model_name_or_path model_name model_id pretrained_model_name_or_path",
                verl="actor_rollout_ref.model.path", openrlhf="pretrain actor.model_name_or_path",
                prime_rl="trainer.model.name orchestrator.model.name inference.model.name"),
    Counterpart(ours="model.dtype", trl="torch_dtype bf16 fp16", told="bfloat16 is the default",
                verl=f"{ACTOR}.fsdp_config.model_dtype {ROLLOUT}.dtype", openrlhf="param_dtype ds.param_dtype"),
    Counterpart(ours="model.quantize", told="nf4 for 4 bits, int8 for 8",
                trl="load_in_4bit load_in_8bit quantization_config bnb_config", openrlhf="ds.load_in_4bit"),
    Counterpart(ours="model.adapter", told="a section with rank, alpha and targets; null trains all weights",
                trl="peft_config use_peft full_finetuning lora_config"),
    Counterpart(ours="model.adapter.rank", trl="r lora_r lora_rank max_lora_rank",
                verl="actor_rollout_ref.model.lora_rank", openrlhf="ds.lora.rank", prime_rl="trainer.model.lora.rank"),
    Counterpart(ours="model.adapter.alpha", trl="lora_alpha", verl="actor_rollout_ref.model.lora_alpha",
                openrlhf="ds.lora.alpha", prime_rl="trainer.model.lora.alpha"),
    Counterpart(ours="model.adapter.targets", trl="target_modules lora_target_modules",
                verl="actor_rollout_ref.model.target_modules", openrlhf="ds.lora.target_modules",
                prime_rl="trainer.model.lora.target_modules"),
    Counterpart(ours=None, told="with dropout the trainer would train another model than the one that was sampled",
                trl="lora_dropout", openrlhf="ds.lora.dropout"),
    Counterpart(ours=None, told="the context is the model's own; engine.max_new_tokens bounds answers, and "
                "task.drop_longer_than prompts",
                trl="max_seq_length max_length vllm_max_model_length", verl=f"{ROLLOUT}.max_model_len",
                openrlhf="max_len data.max_len", prime_rl="seq_len trainer.model.seq_len orchestrator.seq_len"),
    Counterpart(ours="roles.reference", told="the model before training; another one can only be planned with",
                trl="ref_model", openrlhf="ref_pretrain ref.model_name_or_path"),
    Counterpart(ours="roles.critic.name", trl="value_model", verl="critic.model.path",
                openrlhf="critic_pretrain critic.model_name_or_path"),
    Counterpart(ours="roles.reward_model.name", told="read by a reward of kind model",
                trl="reward_model_path", verl="reward_model.model.path reward.reward_model.model_path",
                openrlhf="reward_pretrain reward.model_name_or_path"),
    Counterpart(ours=None, told="the tokenizer is the model's", trl="processing_class tokenizer tokenizer_name_or_path",
                verl="actor_rollout_ref.model.tokenizer_path"),
)

TASK = (
    Counterpart(ours="task.source", trl="train_dataset dataset",
                told="a section: kind hf with a name, or jsonl with a path"),
    Counterpart(ours="task.source.name", told="with task.source.kind: hf", trl="dataset_name",
                openrlhf="prompt_data data.prompt_dataset"),
    Counterpart(ours="task.source.path", told="a .jsonl file with kind jsonl, Parquet with kind hf",
                trl="dataset_path", verl="data.train_files"),
    Counterpart(ours="task.source.subset", trl="dataset_config dataset_config_name"),
    Counterpart(ours="task.source.split", trl="dataset_train_split dataset_split",
                openrlhf="prompt_split data.prompt_split"),
    Counterpart(ours="task.source.columns", told="such as {prompt: question, answer: answer}", verl="data.prompt_key",
                openrlhf="input_key label_key data.input_key data.label_key"),
    Counterpart(ours="task.prompt", told="a template over the columns", openrlhf="input_template data.input_template"),
    Counterpart(ours="task.system", trl="system_prompt", openrlhf="system_prompt"),
    Counterpart(ours="task.template", trl="chat_template_kwargs", verl="data.apply_chat_template_kwargs"),
    Counterpart(ours="task.chat_template", told="a file", trl="chat_template_path",
                verl="actor_rollout_ref.model.custom_chat_template"),
    Counterpart(ours=None, told="the model's chat template is always applied",
                openrlhf="apply_chat_template data.apply_chat_template"),
    Counterpart(ours="task.drop_longer_than", told="longer prompts are dropped, never cut", trl="max_prompt_length",
                verl="data.max_prompt_length data.filter_overlong_prompts",
                openrlhf="prompt_max_len data.prompt_max_len"),
    Counterpart(ours="task.holdout", told="prompts kept back from the same source",
                trl="eval_dataset dataset_test_split", verl="data.val_files", openrlhf="eval.dataset"),
    Counterpart(ours=None, told="prompts are drawn in an order that follows from seed", trl="shuffle_dataset",
                verl="data.shuffle"),
    Counterpart(ours="rewards", told='a list; a function of yours has kind "module:name"',
                trl="reward_funcs reward_functions",
                verl="custom_reward_function custom_reward_function.path custom_reward_function.name "
                "reward.custom_reward_function.path", openrlhf="remote_rm_url reward.remote_url"),
    Counterpart(ours="rewards.0.weight", told="one in each reward", trl="reward_weights"),
    Counterpart(ours="rewards.0.buffer", told="of a reward of kind overlong",
                verl="reward_model.overlong_buffer.len", openrlhf="overlong_buffer_len reward.overlong_buffer_len"),
    Counterpart(ours="environment.kind", told='"module:name" of an async function or a class, or a built-in one',
                trl="environment_factory rollout_func", verl=f"{ROLLOUT}.multi_turn.enable {ROLLOUT}.agent.agent_loop",
                openrlhf="agent_func_path train.agent_func_path", prime_rl="env orchestrator.env"),
    Counterpart(ours="environment.tools", told="with environment.kind: tools; functions of yours are methods of a "
                "class as environment.kind", trl="tools", verl=f"{ROLLOUT}.multi_turn.tool_config_path"),
    Counterpart(ours="environment.turns", trl="max_tool_calling_iterations", prime_rl="max_turns",
                verl=f"{ROLLOUT}.multi_turn.max_assistant_turns {ROLLOUT}.multi_turn.max_turns"),
)

ALGORITHM = (
    Counterpart(ours="algorithm.name", told="such as grpo, dr_grpo, dapo, gspo, cispo, rloo or ppo",
                trl="loss_type importance_sampling_level scale_rewards",
                verl=f"algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo {ACTOR}.loss_agg_mode "
                f"{ACTOR}.policy_loss.loss_mode", openrlhf="advantage_estimator algo.advantage.estimator"),
    Counterpart(ours="algorithm.kl.coef", trl="beta kl_coef", openrlhf="init_kl_coef algo.kl.init_coef",
                verl=f"algorithm.kl_ctrl.kl_coef {ACTOR}.kl_loss_coef"),
    Counterpart(ours="algorithm.kl.estimator", trl="kl_estimator", openrlhf="algo.kl.estimator",
                verl=f"algorithm.kl_penalty {ACTOR}.kl_loss_type"),
    Counterpart(ours="algorithm.kl.where", told="loss or reward", openrlhf="use_kl_loss algo.kl.use_loss",
                verl=f"algorithm.use_kl_in_reward {ACTOR}.use_kl_loss"),
    Counterpart(ours="algorithm.kl.adaptive.target", verl="algorithm.kl_ctrl.target_kl",
                openrlhf="kl_target algo.kl.target"),
    Counterpart(ours="algorithm.kl.adaptive.horizon", verl="algorithm.kl_ctrl.horizon",
                openrlhf="kl_horizon algo.kl.horizon"),
    Counterpart(ours="algorithm.clip", told="a list of how far the ratio may fall and rise, such as [0.2, 0.28]",
                trl="epsilon epsilon_high cliprange",
                verl=f"{ACTOR}.clip_ratio {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high",
                openrlhf="eps_clip eps_clip_low_high actor.eps_clip actor.eps_clip_low_high"),
    Counterpart(ours="algorithm.correction.kind", told="token, sequence, geometric or none",
                trl="vllm_importance_sampling_correction vllm_importance_sampling_mode",
                verl="algorithm.rollout_correction.rollout_is algorithm.rollout_is",
                openrlhf="enable_vllm_is_correction algo.advantage.is_correction_enable "
                "algo.advantage.is_correction_type"),
    Counterpart(ours="algorithm.correction.cap",
                trl="vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
                verl="algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_is_threshold",
                openrlhf="vllm_is_truncated_threshold algo.advantage.is_correction_threshold"),
    Counterpart(ours="algorithm.gae.gamma", verl="algorithm.gamma", openrlhf="algo.advantage.gamma"),
    Counterpart(ours="algorithm.gae.lam", verl="algorithm.lam", openrlhf="lambd algo.advantage.lambd"),
    Counterpart(ours="algorithm.gae.value_clip", trl="cliprange_value", verl="critic.cliprange_value",
                openrlhf="critic.value_clip"),
    Counterpart(ours="algorithm.name", told="dapo drops groups without a contrast and asks anew",
                verl="algorithm.filter_groups algorithm.filter_groups.enable", prime_rl="online_difficulty_filtering",
                openrlhf="dynamic_filtering algo.dynamic_filtering_enable"),
    Counterpart(ours="batch.max_rounds", verl="algorithm.filter_groups.max_num_gen_batches"),
    Counterpart(ours=None, told="answers that are cut off are judged as they are; raise engine.max_new_tokens, or add "
                "a reward of kind overlong", trl="mask_truncated_completions"),
)

BATCH = (
    Counterpart(ours="batch.samples", told="answers to each prompt", trl="num_generations", verl=f"{ROLLOUT}.n",
                openrlhf="n_samples_per_prompt rollout.n_samples_per_prompt",
                prime_rl="rollouts_per_example group_size orchestrator.rollouts_per_example orchestrator.group_size"),
    Counterpart(ours="batch.prompts", told="prompts of a step on all devices, each with batch.samples answers; "
                "micro-batches follow from batch.token_budget",
                trl="per_device_train_batch_size generation_batch_size",
                verl="data.train_batch_size data.gen_batch_size",
                openrlhf="rollout_batch_size rollout.batch_size", prime_rl="batch_size orchestrator.batch_size"),
    Counterpart(ours="batch.updates", told="how many updates the answers of a step are divided into",
                trl="steps_per_generation", verl=f"{ACTOR}.ppo_mini_batch_size", openrlhf="train.batch_size"),
    Counterpart(ours="batch.token_budget", told="in tokens; auto finds one that fits",
                openrlhf="micro_train_batch_size micro_rollout_batch_size "
                "train.micro_batch_size rollout.micro_batch_size train.max_tokens_per_gpu",
                verl=f"{ACTOR}.ppo_micro_batch_size_per_gpu {ACTOR}.ppo_micro_batch_size "
                f"{ACTOR}.ppo_max_token_len_per_gpu {ROLLOUT}.log_prob_micro_batch_size_per_gpu "
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", prime_rl="trainer.micro_batch_size"),
    Counterpart(ours="batch.oversample", prime_rl="oversampling_factor orchestrator.oversampling_factor"),
    Counterpart(ours=None, told="a step accumulates over as many micro-batches as it needs; batch.prompts and "
                "batch.samples say how large it is", trl="gradient_accumulation_steps"),
    Counterpart(ours=None, told="batch.prompts and batch.samples say how many answers a step has, batch.updates how "
                "many updates they are divided into", openrlhf="train_batch_size"),
    Counterpart(ours="batch.epochs", told="1 by default: an answer is trained on once",
                trl="num_iterations num_ppo_epochs", verl=f"{ACTOR}.ppo_epochs critic.ppo_epochs",
                openrlhf="max_epochs train.max_epochs"),
)

ENGINE = (
    Counterpart(ours="engine.kind", told="native, vllm or sglang", trl="use_vllm fast_inference use_transformers_paged",
                verl=f"{ROLLOUT}.name"),
    Counterpart(ours="engine.max_new_tokens", trl="max_completion_length response_length", prime_rl="max_tokens "
                "max_completion_tokens sampling.max_tokens orchestrator.sampling.max_tokens",
                verl=f"data.max_response_length {ROLLOUT}.response_length",
                openrlhf="generate_max_len rollout.max_new_tokens"),
    Counterpart(ours="engine.temperature", verl=f"{ROLLOUT}.temperature", openrlhf="rollout.temperature",
                prime_rl="sampling.temperature orchestrator.sampling.temperature"),
    Counterpart(ours="engine.top_p", verl=f"{ROLLOUT}.top_p", openrlhf="rollout.top_p",
                prime_rl="sampling.top_p orchestrator.sampling.top_p"),
    Counterpart(ours="engine.top_k", verl=f"{ROLLOUT}.top_k", openrlhf="rollout.top_k",
                prime_rl="sampling.top_k orchestrator.sampling.top_k"),
    Counterpart(ours="engine.stop", told="a list of texts", trl="stop_strings", verl=f"{ROLLOUT}.stop"),
    Counterpart(ours=None, told="engine and trainer must agree on the distribution; of what shapes it there are "
                "engine.temperature, engine.top_p and engine.top_k",
                trl="min_p repetition_penalty generation_kwargs presence_penalty"),
    Counterpart(ours="engine.memory_share", told="for the cache alone, without the weights",
                trl="vllm_gpu_memory_utilization gpu_memory_utilization",
                verl=f"{ROLLOUT}.gpu_memory_utilization", openrlhf="vllm.gpu_memory_utilization",
                prime_rl="inference.gpu_memory_utilization"),
    Counterpart(ours="engine.arguments", told="with kind: vllm, a mapping of its own arguments: {max_num_seqs: 512}",
                verl=f"{ROLLOUT}.max_num_seqs {ROLLOUT}.max_num_batched_tokens {ROLLOUT}.enforce_eager "
                f"{ROLLOUT}.engine_kwargs", openrlhf="enforce_eager"),
    Counterpart(ours="engine.url", told="with kind: vllm or sglang, a server of yours; left out, a run starts vLLM",
                trl="vllm_server_base_url vllm_server_host"),
    Counterpart(ours="placement.cells", told="a plan by hand: cells of several devices that generate, mesh: {tp: N}",
                trl="vllm_tensor_parallel_size tensor_parallel_size", verl=f"{ROLLOUT}.tensor_model_parallel_size",
                openrlhf="vllm.tensor_parallel_size vllm_num_engines vllm.num_engines",
                prime_rl="inference.parallel.tp"),
)

OPTIMIZER = (
    Counterpart(ours="optimizer.lr", trl="learning_rate", verl=f"{ACTOR}.optim.lr",
                openrlhf="actor_learning_rate actor.adam.lr", prime_rl="trainer.optim.lr optim.lr"),
    Counterpart(ours="optimizer.name", told="adamw, adamw16bit or adamw8bit", trl="optim",
                verl=f"{ACTOR}.optim.optimizer", prime_rl="trainer.optim.type"),
    Counterpart(ours="optimizer.betas", told="a list of both", trl="adam_beta1 adam_beta2", verl=f"{ACTOR}.optim.betas",
                openrlhf="adam_betas actor.adam.betas"),
    Counterpart(ours="optimizer.weight_decay", verl=f"{ACTOR}.optim.weight_decay",
                prime_rl="trainer.optim.weight_decay",
                openrlhf="l2 actor.adam.weight_decay"),
    Counterpart(ours="optimizer.clip", trl="max_grad_norm", verl=f"{ACTOR}.grad_clip",
                openrlhf="max_norm actor.max_norm", prime_rl="trainer.optim.max_norm"),
    Counterpart(ours="optimizer.schedule", told="constant or cosine", trl="lr_scheduler_type",
                verl=f"{ACTOR}.optim.lr_scheduler_type {ACTOR}.optim.warmup_style",
                openrlhf="lr_scheduler actor.lr_scheduler", prime_rl="trainer.scheduler.type"),
    Counterpart(ours="optimizer.warmup", told="in updates, not as a share", trl="warmup_ratio warmup_steps",
                verl=f"{ACTOR}.optim.lr_warmup_steps {ACTOR}.optim.lr_warmup_steps_ratio",
                openrlhf="lr_warmup_ratio actor.lr_warmup_ratio", prime_rl="trainer.scheduler.warmup_steps"),
    Counterpart(ours="optimizer.checkpointing", trl="gradient_checkpointing use_gradient_checkpointing",
                verl="actor_rollout_ref.model.enable_gradient_checkpointing",
                openrlhf="actor.gradient_checkpointing_enable", prime_rl="trainer.model.ac"),
)

RUN = (
    Counterpart(ours="placement.cluster", told="such as 8xH100, or 2x8xH100 for two hosts", trl="num_processes",
                verl="trainer.n_gpus_per_node trainer.nnodes", prime_rl="inference_gpu_ids trainer_gpu_ids",
                openrlhf="actor_num_nodes actor_num_gpus_per_node actor.num_nodes actor.num_gpus_per_node"),
    Counterpart(ours="placement.strategy", told="flatten: all on every device; separate: apart; auto: the fastest",
                trl="vllm_mode", verl="actor_rollout_ref.hybrid_engine",
                openrlhf="colocate_all_models train.colocate_all colocate_actor_ref train.colocate_actor_ref"),
    Counterpart(ours="placement.staleness", openrlhf="async_train train.async_enable",
                verl="async_training.staleness_threshold", prime_rl="max_async_level max_off_policy_steps "
                "orchestrator.max_async_level orchestrator.max_off_policy_steps"),
    Counterpart(ours=None, told="how models are cut, and what sleeps in host memory, follows from the plan",
                trl="deepspeed fsdp fsdp_config ds3_gather_for_generation vllm_enable_sleep_mode",
                verl=f"{ACTOR}.fsdp_config.param_offload {ACTOR}.fsdp_config.optimizer_offload {ACTOR}.strategy "
                f"actor_rollout_ref.ref.fsdp_config.param_offload {ROLLOUT}.free_cache_engine",
                openrlhf="zero_stage adam_offload ds.zero_stage ds.adam_offload ds.enable_sleep vllm.enable_sleep"),
    Counterpart(ours="run.steps", told="steps, not epochs: an epoch has (training prompts / batch.prompts) of them",
                guesses="epochs total_epochs",
                trl="max_steps num_train_epochs num_epochs", verl="trainer.total_epochs trainer.total_training_steps",
                openrlhf="num_episodes train.num_episodes", prime_rl="trainer.max_steps orchestrator.max_steps"),
    Counterpart(ours="run.folder", trl="output_dir run_name", verl="trainer.default_local_dir trainer.experiment_name",
                openrlhf="save_path ckpt_path ckpt.output_dir ckpt.path"),
    Counterpart(ours="log", told="a list, such as [tensorboard]", trl="report_to", prime_rl="wandb wandb.project",
                verl="trainer.logger trainer.project_name", openrlhf="use_wandb use_tensorboard wandb_project "
                "logger.wandb.key logger.wandb.project logger.tensorboard_dir"),
    Counterpart(ours="checkpoint.every", trl="save_steps", verl="trainer.save_freq", openrlhf="ckpt.save_steps",
                prime_rl="ckpt.interval"),
    Counterpart(ours="checkpoint.keep", trl="save_total_limit", verl="trainer.max_actor_ckpt_to_keep",
                openrlhf="max_ckpt_num ckpt.max_num", prime_rl="ckpt.keep_last"),
    Counterpart(ours="checkpoint.best", trl="metric_for_best_model load_best_model_at_end",
                openrlhf="best_metric_key ckpt.best_metric_key"),
    Counterpart(ours="evaluate.every", trl="eval_steps eval_strategy", verl="trainer.test_freq", openrlhf="eval.steps",
                prime_rl="eval.interval orchestrator.eval.interval"),
    Counterpart(ours="evaluate.pass_k", verl=f"{ROLLOUT}.val_kwargs.n", prime_rl="eval.rollouts_per_example",
                openrlhf="eval_n_samples_per_prompt eval.n_samples_per_prompt"),
    Counterpart(ours="evaluate.prompts", verl="data.val_max_samples", prime_rl="eval.num_examples val.num_examples"),
    Counterpart(ours=None, told="step 0 is always evaluated, unless evaluate.every is 0", trl="eval_on_start",
                verl="trainer.val_before_train"),
    Counterpart(ours="seed", trl="random_state data_seed", verl="data.seed", openrlhf="train.seed"),
    Counterpart(ours=None, told="every step is logged", trl="logging_steps logging_strategy",
                openrlhf="logger.logging_steps"),
    Counterpart(ours=None, told="every answer is kept; `stretto samples RUN` shows them",
                trl="log_completions num_completions_to_print", verl="trainer.rollout_data_dir"),
    Counterpart(ours=None, told="`stretto resume RUN` goes on with a run", trl="resume_from_checkpoint",
                verl="trainer.resume_mode", openrlhf="load_checkpoint ckpt.load_enable", prime_rl="ckpt.resume_step"),
    Counterpart(ours=None, told="all columns stay, and rewards get them", trl="remove_unused_columns"),
    Counterpart(ours=None, told="callbacks are given to stretto.train in Python", trl="callbacks"),
)
# fmt: on

TABLES = {"The model": MODEL, "The task": TASK, "The algorithm": ALGORITHM, "The batch": BATCH, "The engine": ENGINE}
TABLES |= {"The optimizer": OPTIMIZER, "The run": RUN}
"""Heading -> its rows."""


@cache
def foreign_keys() -> dict[str, Counterpart]:
    """Name -> what it is here; dotted names as they are written there."""
    every = [row for rows in TABLES.values() for row in rows]
    return {name: row for row in every for name in (*(name for name, _ in row.names()), *row.guesses.split())}
