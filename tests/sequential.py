"""The plain step: sample, judge, score, train, publish, one after the other on one device, nothing at the same time.

What the runtime does on one device and on many is compared with it. It uses a worker's own verbs and the algorithm's
functions, and none of the scheduler, the lanes and the drivers.
"""

import math
from dataclasses import replace
from functools import partial

from stretto.environments.chat import Sampling
from stretto.environments.render import Renderer
from stretto.environments.trajectory import EnvironmentBudget, RolloutStart, Whereabouts, run_trajectory
from stretto.models.source import locate
from stretto.placement.devices import DeviceKind
from stretto.plugins import folders_of
from stretto.recipe.describe import roles_of
from stretto.rewards.base import sampled_tokens
from stretto.rewards.combine import Rewards
from stretto.rewards.model_scores import reward_model_scores
from stretto.rewards.score import Scored, score
from stretto.runtime.base_copy import prepare_base
from stretto.runtime.batch import StepBatch
from stretto.runtime.build import connect, environment_of, load_task, token_budget
from stretto.runtime.minibatches import credit, keyed_conversations, merged, minibatches, note_stream, value_streams
from stretto.runtime.plans import make_plan
from stretto.runtime.teacher_prompt import teacher_prompt
from stretto.sandbox.pool import Pool
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec
from tiny import CPU

STREAMS = {"reference": "reference", "values": "critic"}
"""What an algorithm needs -> the model that says it."""


class Sequential:
    """A run's models and what is around them."""

    def __init__(self, recipe, folder, *, plan=None, make_worker=Worker):
        plan = plan or make_plan(recipe)
        task, files = load_task(recipe, folder, None), locate(recipe.model.name, folder)
        environment = environment_of(recipe, folder)
        base = prepare_base(
            recipe, files=files, folder=folder, device=CPU, prompts=task.training, environment=environment, note=print
        )
        (device,) = plan.devices
        self.recipe, self.plan = recipe, plan
        self.worker = make_worker(
            WorkerSpec(
                recipe=recipe,
                root=folder,
                folders=folders_of(folder),
                base=base,
                device=device,
                roles=frozenset(roles_of(recipe)),
                token_budget=token_budget(recipe, DeviceKind.CPU),
                sleeps=plan.sleeps_on(device),
            )
        )
        policy = self.worker.policy
        renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens, arguments=recipe.task.template)
        self.__dict__ |= connect(recipe, task, plan, folder, environment=environment, renderer=renderer)
        self.context = policy.context
        self.teacher_prompt = teacher_prompt(recipe, policy.tokenizer, stop=policy.stop_tokens, context=policy.context)
        self.pool = Pool(paths=folders_of(folder))
        self.rewards = Rewards(recipe.rewards, self.pool)

    async def ask(self, request):
        """The engine's answer to one request at a time."""
        done = self.worker.generate([request], (), 60.0)
        while not done:
            done = self.worker.generate((), (), 60.0)
        return done[0]

    def give_up(self, keys):
        """Nothing waits."""

    async def collect(self, launches):
        """A trajectory after the other."""
        sampling = Sampling(
            seed=self.recipe.seed,
            temperature=self.recipe.engine.temperature,
            max_new_tokens=self.recipe.engine.max_new_tokens,
            context=self.context,
        )
        return [
            await run_trajectory(
                launch,
                model=self,
                environment=self.environment,
                renderer=self.renderer,
                sampling=sampling,
                outside=EnvironmentBudget(self.recipe.environment.deadline, Whereabouts()),
            )
            for launch in launches
        ]

    async def score(self, trajectories):
        """Verdicts, those of a reward model among them."""

        async def measure(conversations):
            return self.worker.score("reward", conversations)

        return await score(
            trajectories,
            self.rewards,
            min_samples=self.algorithm.min_samples,
            deadline=self.recipe.deadlines.reward,
            ask=partial(reward_model_scores, measure=measure),
        )

    async def sampled(self):
        """Rounds of prompts until there are enough groups, and the credit of those that are trained on."""
        batch, accepted, every = self.recipe.batch, [], Scored(groups=(), failed=())
        launched = rounds = 0
        while len(accepted) < batch.prompts and rounds < (batch.max_rounds if self.algorithm.drops else 1):
            count = math.ceil((batch.prompts - len(accepted)) * batch.oversample)
            launches = [
                RolloutStart(prompt=prompt, visit=visit, attempt=attempt)
                for prompt, visit in self.prompts.take(count)
                for attempt in range(batch.samples)
            ]
            trajectories = await self.collect(launches)
            for each in trajectories:
                self.lengths.observe(each.prompt.id, sampled_tokens(each))
            scored = await self.score(trajectories)
            accepted += [group for group in scored.groups if not self.algorithm.drop(group)]
            every = Scored(groups=every.groups + scored.groups, failed=every.failed + scored.failed)
            launched, rounds = launched + count, rounds + 1
        self.lengths.decay()
        accepted = accepted[: batch.prompts]
        samples = credit(self.algorithm, accepted, {**self.streams(accepted), **value_streams(self, accepted)})
        return StepBatch(scored=every, accepted=tuple(accepted), samples=samples, launched=launched, rounds=rounds)

    def streams(self, groups):
        """What other models say of the conversations of groups."""
        trajectories, found = [trajectory for group in groups for trajectory in group.trajectories], {}
        for name in STREAMS.keys() & self.algorithm.needs:
            keyed = keyed_conversations(trajectories)
            if name == "reference" and self.teacher_prompt is not None:
                keyed = self.teacher_prompt.asked_all(trajectories, keyed)
            numbers = self.worker.score(STREAMS[name], [conversation for _, conversation in keyed])
            note_stream(found, name, {key: each for (key, _), each in zip(keyed, numbers, strict=True)})
        return found

    def learn(self, samples, *, step):
        """One update, or several over parts shuffled by key; a publish after the last."""
        reports = []
        if self.recipe.batch.updates_a_step > 1:
            old = self.worker.score("policy", [sample.conversation for sample in samples])
            samples = [replace(sample, old=numbers) for sample, numbers in zip(samples, old, strict=True)]
        parts, critic = minibatches(samples, self.recipe, step=step), self.recipe.roles.critic
        for number, part in enumerate(parts, 1):
            learned = []
            for model in self.worker.held_models:
                if model == "critic" or not critic or step > critic.warmup_steps:
                    self.worker.accumulate(model, part)
                learned.append(self.worker.apply(model, number == len(parts)))
            numbers = {name: value for report in learned for name, value in report.metrics.items()}
            reports.append({**numbers, "updates/skipped": float(not all(report.applied for report in learned))})
        return merged(reports)

    def weights(self):
        """A copy of what is trained."""
        return {name: weight.detach().clone() for name, weight in self.worker.policy.trained().items()}

    def critic(self):
        """The same of a critic that is trained."""
        return {name: weight.detach().clone() for name, weight in self.worker.critic.trained().items()}

    async def close(self):
        """Leaves nothing behind."""
        self.worker.close()
        await self.pool.close()
