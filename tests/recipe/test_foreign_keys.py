"""Names of other projects: each leads to the right key of ours, on its own, dotted, in a section and as a change."""

import pytest

from stretto.errors import RecipeError
from stretto.recipe.foreign_keys import TABLES, foreign_keys
from stretto.recipe.load import load_recipe, parse_recipe, read_data
from stretto.recipe.schema import Recipe
from stretto.recipe.schema_text import at

MEANT = {
    # TRL and transformers
    "num_generations": "batch.samples",
    "per_device_train_batch_size": "batch.prompts",
    "steps_per_generation": "batch.updates",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup",
    "max_grad_norm": "optimizer.clip",
    "adam_beta1": "optimizer.betas",
    "gradient_checkpointing": "optimizer.checkpointing",
    "beta": "algorithm.kl.coef",
    "epsilon": "algorithm.clip",
    "epsilon_high": "algorithm.clip",
    "loss_type": "algorithm.name",
    "vllm_importance_sampling_correction": "algorithm.correction.kind",
    "vllm_importance_sampling_cap": "algorithm.correction.cap",
    "max_completion_length": "engine.max_new_tokens",
    "max_prompt_length": "task.drop_longer_than",
    "use_vllm": "engine.kind",
    "vllm_gpu_memory_utilization": "engine.memory_share",
    "reward_funcs": "rewards",
    "train_dataset": "task.source",
    "peft_config": "model.adapter",
    "output_dir": "run.folder",
    "report_to": "log",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluate.every",
    "max_steps": "run.steps",
    "num_train_epochs": "run.steps",
    "epochs": "run.steps",
    "run.total_epochs": "run.steps",
    "chat_template_kwargs": "task.template",
    "environment_factory": "environment.kind",
    # Unsloth
    "lora_alpha": "model.adapter.alpha",
    "r": "model.adapter.rank",
    "target_modules": "model.adapter.targets",
    "load_in_4bit": "model.quantize",
    "random_state": "seed",
    # verl
    "actor_rollout_ref.rollout.n": "batch.samples",
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coef",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "batch.updates",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "batch.token_budget",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "placement.cells",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "data.train_batch_size": "batch.prompts",
    "data.max_response_length": "engine.max_new_tokens",
    "data.train_files": "task.source.path",
    "trainer.total_epochs": "run.steps",
    "trainer.n_gpus_per_node": "placement.cluster",
    "trainer.test_freq": "evaluate.every",
    # OpenRLHF, its flags of before and after 0.10
    "n_samples_per_prompt": "batch.samples",
    "rollout_batch_size": "batch.prompts",
    "init_kl_coef": "algorithm.kl.coef",
    "actor_learning_rate": "optimizer.lr",
    "rollout.n_samples_per_prompt": "batch.samples",
    "algo.advantage.estimator": "algorithm.name",
    "vllm.num_engines": "placement.cells",
    # prime-rl
    "rollouts_per_example": "batch.samples",
    "max_async_level": "placement.staleness",
    "trainer.optim.lr": "optimizer.lr",
}
"""Written down apart from the table."""


def refused(*changes):
    with pytest.raises(RecipeError) as caught:
        load_recipe({}, changes)
    return {problem.field: problem for problem in caught.value.problems}


def test_every_name_leads_to_its_key():
    assert len(MEANT) > 55
    found = refused(*(f"{name}=1" for name in MEANT))
    assert found.keys() == MEANT.keys()
    wrong = {name: found[name].fix for name, key in MEANT.items() if f"`{key}`" not in found[name].fix}
    assert wrong == {}


@pytest.mark.parametrize("row", [row for rows in TABLES.values() for row in rows], ids=str)
def test_every_row_names_a_key_that_there_is(row):
    assert row.ours or row.told
    assert row.ours is None or at(tuple(int(part) if part.isdigit() else part for part in row.ours.split(".")))


def test_no_name_is_one_of_ours_or_stands_twice_for_different_keys():
    for name in foreign_keys():
        assert name not in Recipe.model_fields
        assert not at(tuple(name.split("."))), name
    rows = [(name, row) for rows in TABLES.values() for row in rows for name, _ in row.names()]
    assert {name for name, row in rows if foreign_keys()[name] != row} == set()


def test_a_name_in_a_section_of_ours_leads_to_the_key_unless_the_section_has_a_nearer_one():
    found = refused("algorithm.beta=0.04", "optimizer.beta=0.9", "batch.num_generations=8", "optimizer.warmup_steps=3")
    assert "`algorithm.kl.coef`" in found["algorithm.beta"].fix
    assert "`optimizer.betas`" in found["optimizer.beta"].fix
    assert "`batch.samples`" in found["batch.num_generations"].fix
    assert "`optimizer.warmup`" in found["optimizer.warmup_steps"].fix


def test_where_there_is_nothing_to_set_the_refusal_says_why():
    found = refused("logging_steps=1", "gradient_accumulation_steps=4", "actor_rollout_ref.rollout.free_cache_engine=1")
    assert found["logging_steps"].fix == "take it out: every step is logged"
    assert "batch.samples" in found["gradient_accumulation_steps"].fix
    assert "follows from the plan" in found["actor_rollout_ref.rollout.free_cache_engine"].fix


def test_nothing_is_guessed_of_a_section_that_another_project_has():
    found = refused("critic.optim.lr=1e-5", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.seed=3")
    assert found["critic"].fix == "did you mean `roles.critic`?"
    assert found["actor_rollout_ref.rollout.seed"].fix.startswith("take it out; docs/guides/coming-from.md")


def test_each_key_of_a_foreign_section_is_refused_once_and_the_rest_is_still_checked():
    data = {"trainer": {"total_epochs": 3, "save_freq": 5, "xyz": {"a": 1}}, "seed": 4, "batch": {"samples": 0}}
    reading = read_data(data)
    fields = ["trainer.total_epochs", "trainer.save_freq", "trainer.xyz.a", "batch.samples"]
    assert sorted(problem.field for problem in reading.problems) == sorted(fields)
    assert reading.recipe is not None and reading.recipe.seed == 4


def test_a_model_that_is_a_text_is_its_name():
    assert parse_recipe({"model": "org/name"}).model.name == "org/name"
    recipe = load_recipe({"model": {"name": "a/b", "adapter": None}}, ["model=c/d", "model.dtype=float32"])
    assert (recipe.model.name, recipe.model.adapter, recipe.model.dtype) == ("c/d", None, "float32")
    assert load_recipe({"model": "a/b"}, ["model.adapter=null"]).model.adapter is None


def test_another_section_that_is_a_text_is_told_which_key_the_text_may_be_for():
    found = refused("algorithm=rloo", "engine=vllm", "roles.critic=a/b")
    assert found["algorithm"].fix == "write `algorithm.name: rloo`"
    assert found["engine"].fix == "write `engine.kind: vllm`"
    assert found["roles.critic"].fix == "write `roles.critic.name: a/b`"
