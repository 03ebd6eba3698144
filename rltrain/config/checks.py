"""The config section of what must hold while a run goes on."""

from typing import Literal

from rltrain.config.section import NonNegativeInt, Positive, Section


class Checks(Section):
    """Trainer and engine, compared after every step on response tokens that were drawn by the weights which the step
    began with: of older ones they differ by right. null: no limit. And replicas of models that learn, with each
    other and with what engines have."""

    max_logprob_diff: Positive | None = None
    """Of train/fresh_logprob_abs_diff, the mean difference of log-probs."""
    max_kl: Positive | None = None
    """Of train/fresh_kl, the KL of the trainer from the engine."""
    action: Literal["stop", "pause", "warn"] = "stop"
    """Beyond a limit. stop: the run ends, and the last checkpoint stays the last: none is saved of weights that were
    trained on such tokens. pause: it is saved at the end of its step and ends with an error, to go on from there when
    it is started again."""
    replicas: NonNegativeInt = 0
    """Every so many steps (0: never) ranks with the same part of the actor or the critic compare checksums of all their
    weights, and the run ends where one differs, whose rank and parameter are named: a processor that computes wrong
    numbers, or a memory that does not keep them. With the weights of such a step engines' are compared too, as
    weight_sync.verify has it done with every sync."""
