"""Algorithms for learning from rewards: their roles, their limits and their advantages."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from rltrain.algorithms.algorithm import Algorithm, Replicas
from rltrain.errors import ConfigError
from rltrain.rewards.locating import locate

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.advantages import Groups
    from rltrain.algorithms.losses import LossFunction
    from rltrain.data.experience import Experience

# Algorithms with one advantage per response, from a comparison within the prompt group.

MIN_SAMPLES_PER_GROUP = 2


class GroupRelative(Algorithm):
    """The base class of algorithms with one advantage per response, computed within its prompt group.

    A KL penalty in the reward is summed over the response and subtracted from its reward.
    """

    uses = frozenset({"whiten"})
    compares: ClassVar[str] = "rewards"
    """Experience field passed to `of_groups`."""

    def problems(self) -> Iterator[str]:
        samples = self.config.batch.samples_per_prompt
        if samples < MIN_SAMPLES_PER_GROUP:
            yield (
                f"batch.samples_per_prompt: got {samples}; expected at least {MIN_SAMPLES_PER_GROUP}: algorithm "
                f"{self.name} compares the samples of a prompt, and the advantage of a single one is 0"
            )
        yield from super().problems()

    def problems_of_penalties(self, reason: str) -> Iterator[str]:
        """Yields problems of penalties that change rewards. `reason` explains why the algorithm forbids them."""
        if self.penalizes_reward():
            yield f"loss.kl.where: got reward; expected loss: {reason}"
        if self.config.advantages.overlong_penalty is not None:
            yield f"advantages.overlong_penalty: got one; expected null: {reason}"

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        """Returns the advantages of the training samples from their rewards, fp64, shape [members]."""
        raise NotImplementedError(f"algorithm {self.name} compares nothing")

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.advantages import with_sample_advantages

        return with_sample_advantages(experience, self.of_groups, of=self.compares, token_rewards=token_rewards)


class Grpo(GroupRelative):
    """GRPO: rewards are normalized within the prompt group.

        A_i = (r_i - mean(r)) / std(r)        over the responses of a prompt

    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 4.1.2.

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective") does not divide by std(r).
    Set advantages.normalize_std: false and loss.normalization: dr_grpo for it.
    """

    name = "grpo"
    uses = frozenset({"normalize_std", "whiten"})

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return groups.standardized(rewards) if self.config.advantages.normalize_std else groups.centred(rewards)


MIN_FUNCTIONS = 2


class Gdpo(GroupRelative):
    """GDPO: the scores of several reward functions, each normalized within the prompt group.

        A_i = sum over f of w_f (r_(f, i) - mean(r_f)) / std(r_f)        over the responses of a prompt
        A_i becomes (A_i - mean(A)) / std(A)        over all response tokens of the step

    The weights w_f come from reward.functions and from placed models that score responses. A response that a function
    does not score (None) is left out of that function's groups. With advantages.normalize_std: false the first division
    is left out. Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
    Optimization".
    """

    name = "gdpo"
    uses = frozenset({"normalize_std", "whiten"})
    whitens = True
    compares = "reward_parts"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(self.config.reward_weights) < MIN_FUNCTIONS:
            yield (
                f"reward.functions: got {len(self.config.reward.functions or ())}; expected at least {MIN_FUNCTIONS}: "
                "algorithm gdpo normalizes each function separately. For a single function use algorithm grpo"
            )
        yield from self.problems_of_penalties(
            "algorithm gdpo uses the scores of the single reward functions, and a penalty is not one of them"
        )

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        """Takes `rewards` of shape [members, functions]. NaN marks a function without a score for the sample."""
        advantages = rewards.new_zeros(len(rewards))
        for part, weight in zip(rewards.unbind(1), self.config.reward_weights, strict=True):
            known = ~part.isnan()
            own, among = part[known], groups.select(known)
            normalised = among.standardized(own) if self.config.advantages.normalize_std else among.centred(own)
            advantages[known] += weight * normalised
        return advantages


class Gpg(GroupRelative):
    """GPG: rewards are centred within the prompt group and scaled by the share of samples with a learning signal.

        A_i = alpha (r_i - mean(r))        over the responses of a prompt
        alpha = B / (B - M)        for B samples of the step, M of them from prompts with equal rewards

    Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning". The paper's loss
    has no ratio: set loss.policy: reinforce. With advantages.scale_by: rewarded, as in verl, B - M is the number of
    samples with a non-zero reward.
    """

    name = "gpg"
    uses = frozenset({"scale_by"})

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return groups.centred(rewards)

    def needs_whole_step(self) -> bool:
        return True

    def over_whole_step(self, experience: "Experience", replicas: Replicas) -> "Experience":
        import torch

        from rltrain.algorithms.losses import of_response, response_lengths, sample_sums

        members, groups = response_lengths(experience) > 0, experience.group_ids
        if self.config.advantages.scale_by == "rewarded":
            counted = members & (experience.rewards != 0)
        else:
            differing = sample_sums(experience, of_response(experience, "advantages").abs()) != 0
            counted = members & torch.isin(groups, groups[differing])
        num_samples, num_counted = replicas.total(torch.stack([members.sum(), counted.sum()]).double()).tolist()
        return experience.with_fields(advantages=experience.advantages * (num_samples / max(num_counted, 1)))


class MaxRl(GroupRelative):
    """MaxRL: the gradient of the log of a prompt's success rate, instead of the success rate itself.

        A_i = (r_i - mean(r)) / mean(r)        over the responses of a prompt, 0 if mean(r) is 0

    For n responses with k successes, this is 1/k times the sum of the successes' gradients, minus 1/n times the sum of
    all gradients. Its expectation is the gradient of -sum over m < n of (1 - p)^m / m: the first terms of log p for a
    success rate p. Rewards must be probabilities of success, from 0 to 1.

    Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", with the mean as control variate.
    """

    name = "maxrl"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.problems_of_penalties(
            "algorithm maxrl divides by the mean reward of a prompt, and that must be its success rate"
        )

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        means = groups.means(rewards)
        fails = means <= 0
        return groups.centred(rewards).masked_fill(fails, 0) / means.masked_fill(fails, 1)


class PassAtK(GroupRelative):
    """pass_at_k: a response is rewarded for improving the best of k responses.

        A_i = mean over the sets I of k responses with i in I of (max of r over I - max of r over I without i)

    over the n responses of a prompt. The paper's s_i is k / n times A_i. The sum over i of s_i grad log p_i is an
    unbiased estimate of the gradient of E[max of k rewards]. Walder and Karkhanis 2025, "Pass@K Policy Optimization:
    Solving Harder Reinforcement Learning Problems", the estimator with the leave-one-out baseline of k - 1 samples.

    With k = n it is the best reward minus the second best, for the best response alone: Tang et al. 2025, "Optimizing
    Language Models for Inference Time Objectives using Reinforcement Learning". advantages.normalize_std divides by the
    standard deviation of the prompt's rewards.
    """

    name = "pass_at_k"
    uses = frozenset({"normalize_std", "k", "whiten"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        k, samples = self.config.advantages.k, self.config.batch.samples_per_prompt
        if not 2 <= k <= max(samples, 2):
            yield (
                f"advantages.k: got {k} with batch.samples_per_prompt {samples}; expected 2 to {samples}: algorithm "
                "pass_at_k takes the best of k samples of a prompt, and the best of one is grpo's or rloo's"
            )

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        from rltrain.algorithms.advantages import gains_of_best

        gains = gains_of_best(rewards, groups, self.config.advantages.k)
        return groups.over_deviations(gains, rewards) if self.config.advantages.normalize_std else gains


class Rloo(GroupRelative):
    """RLOO: the baseline of a response is the mean reward of the other responses to its prompt.

        A_i = r_i - 1/(n - 1) sum over j != i of r_j        over the n responses of a prompt

    The only episode of a group has its own mean as the baseline. Ahmadian et al. 2024, "Back to Basics: Revisiting
    REINFORCE Style Optimization for Learning from Human Feedback in LLMs" (Kool et al. 2019, "Buy 4 REINFORCE Samples,
    Get a Baseline for Free!").
    """

    name = "rloo"

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return (rewards - groups.others_means(rewards)).masked_fill(groups.are_equal(rewards), 0)


class ReMax(Algorithm):
    """ReMax: the baseline of a response is the reward of the greedy response to its prompt.

        A_i = r(x, y_i) - r(x, greedy y)

    One greedy response per prompt is generated and scored, but not trained on. A KL penalty in the reward comes from
    the sampled response alone. Li et al. 2024, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method
    for Aligning Large Language Models".
    """

    name = "remax"
    uses = frozenset({"whiten"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config.env.agent is not None:
            yield (
                "env.agent: got one with algorithm remax; expected none: an agent's requests choose their own sampling "
                "parameters, and remax needs a greedy episode"
            )

    def greedy_samples_per_group(self) -> int:
        return 1

    def compared_with_greedy(self, experience: "Experience") -> "Experience":
        from rltrain.algorithms.advantages import less_greedy_rewards

        return less_greedy_rewards(experience, self.is_greedy(experience))

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.advantages import with_sample_advantages

        return with_sample_advantages(experience, lambda rewards, _: rewards, token_rewards=token_rewards)


class ReinforcePlusPlus(Algorithm):
    """REINFORCE++: returns per token, normalized over all tokens of the step.

        A_t = sum over i >= t of gamma^(i - t) (r at the last token - beta KL_i)
        A_t becomes (A_t - mean(A)) / std(A)        over all response tokens of the step

    A KL penalty in the reward is subtracted token by token. Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free
    Policy Optimization with Global Advantage Normalization", uses gamma 1 and the estimator k1.
    """

    name = "reinforce_plus_plus"
    per_token = True
    uses = frozenset({"gamma", "whiten"})
    whitens = True

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.advantages import with_returns_to_go

        return with_returns_to_go(experience, token_rewards, gamma=self.config.advantages.gamma)


class ReinforcePlusPlusBaseline(GroupRelative):
    """REINFORCE++ with a baseline: rewards are centred within the prompt group and normalized over the step.

        A_i = r_i - mean(r)        over the responses of a prompt
        A_i becomes (A_i - mean(A)) / std(A)        over all response tokens of the step

    Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization", the
    variant for several responses to a prompt. The paper has the KL penalty in the loss: loss.kl.where: loss and
    estimator k2.
    """

    name = "reinforce_plus_plus_baseline"
    whitens = True

    def of_groups(self, rewards: "Tensor", groups: "Groups") -> "Tensor":
        return groups.centred(rewards)


EPS = 1e-8
"""Added to the sum of the weights, as in verl."""


class OptimalTokenBaseline(GroupRelative):
    """The optimal token baseline: a weighted mean of the responses' returns at the same token position.

        A_(i, t) = G_(i, t) - sum over j of W_(j, t) G_(j, t) / sum over j of W_(j, t)
        W_(j, t) = sum over s <= t of rho_(j, s)^2 (1 - 2 p_(j, s) + sum over tokens v of p_(j, s)(v)^2)

    The sums over j are over the responses of the prompt that have a t-th token. G is the return from token t on, and p
    the actor's probability. The bracket is the squared norm of the log-prob's gradient with respect to the logits. The
    weight rho is that of loss.correction, or 1.

    If only response i has a t-th token, A is G there. The only response of a group has A = 0. A KL penalty in the
    reward is subtracted token by token. Li et al. 2026, "The Optimal Token Baseline: Variance Reduction for
    Long-Horizon LLM-RL", in verl's version.
    """

    name = "optimal_token_baseline"
    per_token = True
    needs_actor_squares = True

    def usable_roles(self) -> frozenset[str]:
        return super().usable_roles() - {"inference"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        reason = f"algorithm {self.name} needs the actor's probabilities of all tokens at the start of the step"
        if not self.needs_actor_logprobs():
            yield f"loss.old_logprobs: got {self.config.loss.old_logprobs}; expected actor: {reason}"
        if self.config.model.router_replay == "recompute":
            yield f"model.router_replay: got recompute; expected null or rollout: {reason}, without the routing"

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        """Needs the fields actor_logprobs and actor_squares, and rollout_logprobs if loss.correction is set."""
        import torch

        from rltrain.algorithms.advantages import Rectangle, with_returns_to_go

        returns = with_returns_to_go(experience, token_rewards, gamma=1.0)
        rows = Rectangle.of(experience)
        mask = rows.padded(experience.response_mask.double())
        to_go = rows.padded(returns.advantages.double()) * mask
        weights = (rows.padded(self._energies(experience)) * mask).cumsum(1) * mask
        groups = experience.group_ids
        zeros = torch.zeros(3, int(groups.max()) + 1 if len(groups) else 0, rows.shape[1], dtype=torch.float64)
        sums = zeros.index_add(1, groups, torch.stack([to_go * weights, weights, mask]))[:, groups]
        baselines = (sums[0] / (sums[1] + EPS)).masked_fill(sums[2] == 1, 0)
        members = (mask.sum(1) > 0).long()
        is_alone = torch.zeros(zeros.shape[1], dtype=torch.int64).index_add(0, groups, members)[groups] == 1
        advantages = ((to_go - baselines) * mask).masked_fill(is_alone[:, None], 0)
        return experience.with_fields(
            advantages=rows.packed(advantages, experience.num_tokens).to(experience.rewards.dtype)
        )

    def _energies(self, experience: "Experience") -> "Tensor":
        """Returns the squared gradient norms times the squared correction weights, fp64, shape [tokens]."""
        from rltrain.algorithms.correction import weights_of
        from rltrain.algorithms.losses import of_response

        actor, settings = of_response(experience, "actor_logprobs").double(), self.config.loss.correction
        energy = 1 - 2 * actor.exp() + experience.actor_squares.double()
        if settings.high is None:
            return energy
        log_ratio = actor - of_response(experience, "rollout_logprobs").double()
        return energy * weights_of(experience, log_ratio, settings)[0].square()


class Ppo(Algorithm):
    """PPO: advantages are estimated from the critic's values by GAE, and whitened over the response tokens of a step.

        A_t = sum over l of (gamma lambda)^l delta_(t + l),   delta_t = r_t + gamma V_(t + 1) - V_t

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", with the advantages of Schulman et al. 2016,
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation".
    """

    name = "ppo"
    per_token = True
    uses = frozenset({"gamma", "gae_lambda", "whiten"})
    whitens = True

    def needs(self) -> dict[str, str]:
        return {**super().needs(), "critic": f"algorithm {self.name}"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.first_actor_step() >= self.config.steps:
            yield (
                f"critic.critic_warmup_steps: got {self.first_actor_step()} of {self.config.steps} steps (config key "
                "steps); expected fewer, so that the actor learns too"
            )

    def first_actor_step(self) -> int:
        return self.config.critic.critic_warmup_steps

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        from rltrain.algorithms.advantages import with_gae

        settings = self.config.advantages
        return with_gae(experience, token_rewards, gamma=settings.gamma, lam=settings.gae_lambda)


# Advantages from a user function of a whole step.

OF_SAMPLES = ("rewards", "groups")
OF_TOKENS = ("token_level_rewards", "response_mask", "index")
"""The parameter names of verl and SkyRL."""
COEFFICIENTS = ("gamma", "lambd", "lam")
TOKEN_FIELDS = ("advantages", "response_mask")


class OwnAdvantages(Algorithm):
    """Advantages from the user function advantages.function.

    It is called once per step with the samples of all replicas. Its parameter names select a form.

    - (rewards, groups): rewards and prompt numbers, [samples] each. It returns advantages [samples].
    - (token_level_rewards, response_mask, index): the form of verl and SkyRL. The first two are [samples, longest
      response], `index` is a numpy array [samples]. It returns advantages of the first shape, alone or followed by the
      returns.

    A KL penalty in the reward is subtracted token by token.
    """

    name = "own"
    per_token = True
    uses = frozenset({"function", "gamma", "gae_lambda"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        advantages, teacher = self.config.advantages, self.config.teacher
        if advantages.function is None:
            yield 'advantages.function: got null; expected "file.py:function" or "module:function" for algorithm own'
        if advantages.mask_truncated:
            yield "advantages.mask_truncated: got true; expected false: the function of algorithm own sees all samples"
        if "teacher" in self.config.placed_roles and teacher.where == "advantage":
            yield "teacher.where: got advantage; expected loss: the function of algorithm own computes the advantages"

    @cached_property
    def function(self) -> "OwnFunction":
        """The user function. Raises ConfigError if there is no such function, or if its parameters do not fit."""
        found = OwnFunction.of(self.config.advantages.function or "", "advantages.function")
        known = OF_SAMPLES if found.takes(OF_SAMPLES) else OF_TOKENS
        found.require_known((OF_SAMPLES, OF_TOKENS), (*known, *COEFFICIENTS))
        return found

    def loss_function(self) -> "LossFunction":
        _ = self.function  # reports an unusable function before any sample is generated
        return super().loss_function()

    def needs_whole_step(self) -> bool:
        return True

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        """Stores the rewards per token in the field advantages until the step is whole."""
        import torch

        from rltrain.algorithms.advantages import rewards_at_tokens

        positions, _, rewards = rewards_at_tokens(experience, token_rewards)
        per_token = torch.zeros(experience.num_tokens, dtype=experience.rewards.dtype)
        return experience.with_fields(advantages=per_token.index_put((positions,), rewards.to(per_token.dtype)))

    def over_whole_step(self, experience: "Experience", replicas: Replicas) -> "Experience":
        import torch

        from rltrain.data.experience import Experience

        names = ("sample_ids", "lengths", *TOKEN_FIELDS)
        fields = {name: replicas.gathered(getattr(experience, name)) for name in names}
        unread = torch.zeros_like(fields["response_mask"])
        step = Experience(group_ids=self._groups(fields["sample_ids"]), tokens=unread, **fields)
        order = torch.argsort(step.sample_ids)
        whole = step.select(order)
        whole = whole.with_fields(advantages=self._advantages(whole))
        own = torch.searchsorted(whole.sample_ids, experience.sample_ids)
        advantages = whole.select(own).advantages.masked_fill(~experience.response_mask, 0)
        return experience.with_fields(advantages=advantages.to(experience.rewards.dtype))

    def _groups(self, sample_ids: "Tensor") -> "Tensor":
        """Returns consecutive numbers of the prompts, from 0, shape [samples]."""
        import torch

        from rltrain.data.experience import SIBLINGS_APART

        number = sample_ids % SIBLINGS_APART // (self.samples_per_group() + self.greedy_samples_per_group())
        groups: Tensor = torch.unique(number, return_inverse=True)[1]
        return groups

    def _advantages(self, step: "Experience") -> "Tensor":
        """Returns the user function's advantages of a whole step, shape [tokens]."""
        from torch import Tensor

        from rltrain.algorithms.advantages import Rectangle
        from rltrain.algorithms.losses import of_response, sample_index, sample_sums

        settings, function = self.config.advantages, self.function
        given: dict[str, Any] = {"gamma": settings.gamma, "lambd": settings.gae_lambda, "lam": settings.gae_lambda}
        rewards = of_response(step, "advantages").double()
        of_samples = function.takes(OF_SAMPLES)
        rows = Rectangle.of(step)
        if of_samples:
            given |= {"rewards": sample_sums(step, rewards), "groups": step.group_ids}
        else:
            mask = rows.padded(step.response_mask.float())
            given |= {"token_level_rewards": rows.padded(rewards).float(), "response_mask": mask}
            given["index"] = step.group_ids.numpy()
        answer = function.call(given)
        answer = answer[0] if isinstance(answer, tuple) and answer else answer
        shape = (step.num_samples,) if of_samples else rows.shape
        if not isinstance(answer, Tensor) or tuple(answer.shape) != shape:
            found = tuple(answer.shape) if isinstance(answer, Tensor) else f"{answer!r:.60}"
            raise function.error(f"returned {found}; expected a tensor of shape {shape}")
        return answer[sample_index(step)] if of_samples else rows.packed(answer, step.num_tokens)


# User functions. Their parameter names select their arguments.


@dataclass(frozen=True)
class OwnFunction:
    """The user function `name`, given under `config_key`."""

    name: str
    config_key: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    @classmethod
    def of(cls, name: str, config_key: str) -> "OwnFunction":
        """Finds the function. Raises ConfigError if it does not exist."""
        function = locate(name, config_key)
        return cls(name, config_key, function, inspect.signature(function).parameters)

    def takes(self, names: Sequence[str]) -> bool:
        """Returns whether the function has parameters of all these names."""
        return all(name in self.parameters for name in names)

    def require_known(self, forms: Sequence[Sequence[str]], known: Sequence[str]) -> None:
        """Raises ConfigError if the parameters match none of `forms`, or if one without a default is not in `known`."""
        if not any(self.takes(names) for names in forms):
            expected = " or ".join(f"({', '.join(names)})" for names in forms)
            raise self.error(f"takes ({', '.join(self.parameters)}); expected parameters {expected}")
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for name, parameter in self.parameters.items():
            if parameter.kind not in variable and parameter.default is parameter.empty and name not in known:
                raise self.error(f"asks for parameter {name}; available are {', '.join(known)}")

    def call(self, values: Mapping[str, Any]) -> Any:
        """Calls the function with its parameters' values out of `values`. Raises ConfigError if the function raises."""
        try:
            return self.function(**{name: value for name, value in values.items() if name in self.parameters})
        except Exception as error:
            raise self.error(f"raised {type(error).__name__}: {error}") from error

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.config_key}: {self.name!r} {what}")
