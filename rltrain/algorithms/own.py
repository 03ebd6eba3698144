"""Advantages by a function of the user's, which is given a whole step."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rltrain.algorithms.algorithm import Algorithm, Replicas

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.algorithms.losses import LossFunction
    from rltrain.algorithms.own_function import OwnFunction
    from rltrain.data.experience import Experience

OF_SAMPLES = ("rewards", "groups")
OF_TOKENS = ("token_level_rewards", "response_mask", "index")
"""verl's and SkyRL's names."""
COEFFICIENTS = ("gamma", "lambd", "lam")
TOKEN_FIELDS = ("advantages", "response_mask")


class Own(Algorithm):
    """advantages.function is called once a step with the samples of all replicas, by its parameters' names:

        (rewards, groups)        [samples] rewards and numbers of prompts; it gives [samples] advantages
        (token_level_rewards, response_mask, index)        verl's and SkyRL's: [samples, longest response] twice, and an
                                 array [samples]; it gives advantages of that shape, alone or before the returns

    The distance from the reference, where loss.kl is in the reward, is taken off token by token.
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
            yield "teacher.where: got advantage; expected loss: the function of algorithm own says what advantages are"

    @cached_property
    def function(self) -> "OwnFunction":
        """ConfigError where there is none that can be called."""
        from rltrain.algorithms.own_function import OwnFunction

        found = OwnFunction.of(self.config.advantages.function or "", "advantages.function")
        known = OF_SAMPLES if found.takes(OF_SAMPLES) else OF_TOKENS
        found.require_known((OF_SAMPLES, OF_TOKENS), (*known, *COEFFICIENTS))
        return found

    def loss_function(self) -> "LossFunction":
        _ = self.function  # one that cannot be called is told of before anything is drawn
        return super().loss_function()

    def needs_whole_step(self) -> bool:
        return True

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        """The rewards of tokens stand in the place of advantages until the step is whole."""
        import torch

        from rltrain.algorithms.gae import rewards_at_tokens
        from rltrain.algorithms.losses import sample_index

        positions = torch.nonzero(experience.response_mask).flatten()
        rewards = rewards_at_tokens(experience, positions, sample_index(experience)[positions], token_rewards)
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
        """Numbers of the prompts, from 0 on."""
        import torch

        from rltrain.data.experience import SIBLINGS_APART

        number = sample_ids % SIBLINGS_APART // (self.samples_per_group() + self.greedy_samples_per_group())
        groups: Tensor = torch.unique(number, return_inverse=True)[1]
        return groups

    def _advantages(self, step: "Experience") -> "Tensor":
        """[tokens] of a step, what its function says."""
        from torch import Tensor

        from rltrain.algorithms.losses import of_response, sample_index, sample_sums
        from rltrain.algorithms.rectangles import Rectangle

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
