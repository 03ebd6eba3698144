"""Routers and experts: load balance, routing replay, gpt-oss's matrices and rounded weights."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rltrain.config import schema
from rltrain.config.schema import FakeQuantization
from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.models.experts import is_expert
from rltrain.models.products import clamped_swiglu
from rltrain.models.routing_shape import NOT_RECORDED
from rltrain.training.fake_quantization import rounded
from rltrain.training.megatron.norms import parameter_device
from rltrain.training.packing import WHOLE, ContextShare, MicroBatch

# Routing replay: experts are given by the engine that sampled the tokens, or by an earlier pass of the actor.
#
# Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"
# (arXiv:2510.11370). Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs" (arXiv:2512.01374), has both
# kinds.

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Choices:
    """The routing of a micro-batch on this rank, by layer: experts [tokens of this rank, top_k].

    `given` experts are replayed. A token with NOT_RECORDED chooses itself. `found` receives the chosen experts, unless
    it is None.
    """

    given: Mapping[int, Tensor]
    found: dict[int, Tensor] | None = None
    tokens: Tensor | None = None
    """The number of tokens of each row of this rank, [rows, 1], if samples share rows. None: 1."""


class ReplayedChoice:
    """The replay of one router, instead of Megatron's `RouterReplay`.

    Megatron's has one list for all models of a process and cannot separate micro-batches in flight. The weights of
    given experts are the router's own scores, so gradients flow to the router.
    """

    def __init__(self, device: Any) -> None:
        self.layer = 0
        self.choices: Choices | None = None
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Two counts since the last step, in passes with gradients: given choices, and those that the router would not
        have made."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns scores and numbers of the chosen experts, [tokens, top_k] each, from `scores` [tokens, experts].

        Megatron calls it.
        """
        assert default_compute_topk is not None, "Megatron gives its own way of choosing"
        best, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.choices is None:
            return best, own
        chosen = own
        if (given := self.choices.given.get(self.layer)) is not None:
            given = given.to(own)
            is_given = given != NOT_RECORDED
            chosen = torch.where(is_given, given, own)
            if torch.is_grad_enabled():
                differ = (given[:, :, None] != own[:, None]).all(-1) & is_given
                tokens = 1 if self.choices.tokens is None else self.choices.tokens
                self.counts += torch.stack([(is_given * tokens).sum(), (differ * tokens).sum()])
        if self.choices.found is not None:
            self.choices.found[self.layer] = chosen
        return scores.gather(1, chosen), chosen


# Routers that know the sample of each token: balance losses, loads, and biases that follow the loads.

NAMES_OF_LOSSES = ("moe_aux_loss", "moe_z_loss")
REPLAYED, DIFFERING = "replayed_choices", "replayed_choices_differing"
"""Metrics of an optimizer step with given choices."""


@dataclass(frozen=True)
class RoutedSamples:
    """The samples of a micro-batch's tokens.

    `of_token` [rows of this rank with padding] are sample numbers. Padding has the last number. `lengths` [samples + 1]
    count the tokens of each on all ranks. `shares` [samples + 1] are the weights in the loss, 0 for padding.

    If samples share rows, `rows` are the rows of the tokens on this rank, [tokens], and `of_token` [tokens] are their
    samples. Padding is left out.
    """

    of_token: Tensor
    lengths: Tensor
    shares: Tensor
    rows: Tensor | None = None

    def of_rows(self, first: int, count: int, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the sample, the logits and the chosen experts of each token in some rows, [tokens, ...]. `logits` and
        `chosen` have only these rows, [count, experts]."""
        if self.rows is None:
            return self.of_token[first : first + count], logits, chosen
        here = (self.rows >= first) & (self.rows < first + count)
        places = self.rows[here] - first
        return self.of_token[here], logits[places], chosen[places]


def routed_samples(batch: MicroBatch, shares: Tensor, share: ContextShare = WHOLE) -> RoutedSamples:
    """Returns the samples of a micro-batch's tokens on this rank of `share`. `shares` [samples] are on the
    micro-batch's device."""
    device, shares = shares.device, torch.nn.functional.pad(shares.float(), (0, 1))
    padding = 0 if batch.tree is not None else sum(batch.segments) - batch.num_tokens
    lengths = torch.tensor([*batch.lengths, padding])
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if batch.slices is None:
        return RoutedSamples(numbers.to(device), lengths.to(device), shares)
    if batch.tree is None:
        return RoutedSamples(batch.slices.sample_of_row, lengths.to(device), shares)
    rows = batch.rows_of_all(share)
    here = rows >= 0
    return RoutedSamples(numbers[here].to(device), lengths.to(device), shares, rows[here].to(device))


class SparseLayer(TransformerLayer):
    """A layer with experts."""

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        told, router = vars(settings["packed_seq_params"]), self.mlp.router
        router.samples, router.replayed.choices = told.get("routed_samples"), told.get("choices")
        return super().forward(*arguments, **settings)


class SampleRouter(TopKRouter):
    """Megatron's router with its own losses, and a bias that only changes between optimizer steps.

    Megatron's losses treat a micro-batch as a whole, count tokens of padding, and use groups of the global parallel
    state.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **settings: Any
    ) -> None:
        """Takes `settings` because some releases of Megatron pass more arguments."""
        super().__init__(config=config, pg_collection=pg_collection, **settings)
        device = torch.cuda.current_device()
        if self.score_function == "sigmoid":
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(self.num_experts, device=device))
        self.samples: RoutedSamples | None = None
        self.is_recomputed = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        self.waiting: deque[tuple[RoutedSamples | None, Choices | None]] = deque()
        self.load = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        """Tokens sent to each expert by this rank's part of the mini-batch, since the last step, [experts]. Padding
        does not count."""
        self.replayed = self.router_replay = ReplayedChoice(device)
        self.losses = torch.zeros(len(NAMES_OF_LOSSES), dtype=torch.float64, device=device)
        """NAMES_OF_LOSSES for this rank's tokens since the last step, undivided and without coefficients."""

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        self.replayed.layer = layer_number - 1

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        """Restores the micro-batch's samples and choices before a recomputation.

        If all experts of a layer are recomputed, later micro-batches may have started before. So the inputs wait in a
        queue, in the order of backward.
        """
        if self.is_recomputed and self.training:
            if torch.is_grad_enabled():
                self.samples, self.replayed.choices = self.waiting.popleft()
            else:
                self.waiting.append((self.samples, self.replayed.choices))
        return super().forward(*arguments, **settings)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights and choice of experts, [tokens, experts] each, from `logits` [tokens, 1, experts].

        Collective over: the tensor- and context-parallel ranks, with a balance loss.
        """
        probs, chosen = super().routing(logits)
        if not (torch.is_grad_enabled() and self.samples):
            return probs, chosen
        logits = logits.view(-1, self.num_experts).float()
        first = self.tp_group.rank() * len(logits) if self.config.sequence_parallel else 0
        of_token, logits, experts = self.samples.of_rows(first, len(logits), logits, chosen)
        is_sample = of_token < len(self.samples.shares) - 1
        self.load += (experts & is_sample[:, None]).sum(0)
        weights = (self.samples.shares / self.samples.lengths.clamp(min=1))[of_token]
        losses = []
        for number, (coefficient, loss) in enumerate(
            ((self.config.moe_aux_loss_coeff, self._imbalance), (self.config.moe_z_loss_coeff, self._size))
        ):
            if coefficient:
                value = (weights * loss(logits, of_token, self.samples)).sum()
                self.losses[number] += value.detach()
                losses.append(coefficient * value)
        return (MoEAuxLossAutoScaler.apply(probs, sum(losses)) if losses else probs), chosen

    def _imbalance(self, logits: Tensor, of_token: Tensor, samples: RoutedSamples) -> Tensor:
        """Returns the balance loss per token, [tokens]. It is 1 for even loads.

        It is the sum over experts of the token's score times the expert's load, relative to the mean load. The load
        counts the tokens of the same sample with the expert among their best. Gradients flow through the scores.
        """
        scores = logits.softmax(-1) if self.score_function == "softmax" else logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        with torch.no_grad():
            best = torch.zeros_like(scores).scatter(1, scores.topk(self.topk, dim=1).indices, 1.0)
            loads = scores.new_zeros(len(samples.lengths), self.num_experts).index_add(0, of_token, best)
            if self.config.sequence_parallel or self.config.context_parallel_size > 1:
                dist.all_reduce(loads, group=self.tp_cp_group)
            loads *= self.num_experts / (self.topk * samples.lengths.clamp(min=1)[:, None])
        return (scores * loads[of_token]).sum(-1)

    @staticmethod
    def _size(logits: Tensor, *_: Any) -> Tensor:
        """Returns the squared log-sum-exp, [tokens]."""
        return logits.logsumexp(-1).square()

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return logits

    def _apply_expert_bias(self, *unused: Any, **also_unused: Any) -> None:
        pass


@dataclass(frozen=True)
class Loads:
    """The expert loads of a mini-batch and their metrics.

    `tokens` [layers, experts] are for the whole model, with zeros for layers without experts.
    """

    tokens: Tensor
    metrics: Mapping[str, float]


class Routers:
    """The routers of a rank's layers. The stage may have none."""

    def __init__(
        self, model: torch.nn.Module, architecture: Architecture, settings: schema.MoE, groups: ProcessGroupCollection
    ) -> None:
        self._routers = {m.layer_number - 1: m for m in model.modules() if isinstance(m, SampleRouter)}
        further = (architecture.predicting_kind.sparse,) if architecture.predicts else ()
        self._has_experts = torch.tensor((*architecture.sparse_layers, *further))
        self._num_experts, self._num_layers = architecture.num_experts, architecture.num_layers
        self._settings, self._groups = settings, groups

    def take(self, divisor: float, device: torch.device) -> Loads:
        """Returns the counts since the last call, and losses over `divisor`. Collective over: the role's ranks."""
        tokens = torch.zeros(len(self._has_experts), self._num_experts, dtype=torch.int64, device=device)
        losses = torch.zeros(len(NAMES_OF_LOSSES), dtype=torch.float64, device=device)
        replayed = torch.zeros(2, dtype=torch.int64, device=device)
        for layer, router in self._routers.items():
            tokens[layer] = router.load
            losses += router.losses
            replayed += router.replayed.counts
            for counted in (router.load, router.losses, router.replayed.counts):
                counted.zero_()
        for group in (self._groups.tp_dp_cp, self._groups.pp):
            for counted in (tokens, losses, replayed):
                dist.all_reduce(counted, group=group)
        of_layers = tokens.cpu()[self._has_experts].double()
        num_choices = int(tokens[: self._num_layers].sum())  # the prediction layer gets no choices
        metrics = load_metrics(of_layers) | replay_metrics(*replayed.tolist(), num_choices=num_choices)
        for name, loss, coefficient in zip(
            NAMES_OF_LOSSES, losses.tolist(), (self._settings.aux_loss_coef, self._settings.z_loss_coef), strict=True
        ):
            if coefficient:
                metrics[name] = loss / (len(of_layers) * (divisor or 1))
        if self._settings.log_loads:
            layers = torch.nonzero(self._has_experts).flatten().tolist()
            for layer, loads in zip(layers, _relative(of_layers).tolist(), strict=True):
                metrics |= {f"moe_load/{layer}/{expert}": load for expert, load in enumerate(loads)}
        return Loads(tokens, metrics)

    @torch.no_grad()
    def update_biases(self, loads: Loads) -> None:
        """Raises the biases of experts with fewer tokens than the mean, and lowers the others."""
        rate = self._settings.bias_update_rate
        for layer, router in self._routers.items():
            tokens = loads.tokens[layer].double()
            if rate and router.expert_bias is not None:
                router.expert_bias += rate * (tokens.mean() - tokens).sign().float()


def load_metrics(tokens: Tensor) -> dict[str, float]:
    """Returns metrics of `tokens` [layers with experts, experts], the tokens sent to each expert."""
    relative = _relative(tokens)
    busiest = relative.amax(-1)
    return {
        "moe_load_imbalance": float(busiest.max()),
        "moe_load_imbalance_mean": float(busiest.mean()),
        "moe_load_min": float(relative.min()),
        "moe_idle_experts": float((tokens == 0).sum()),
    }


def replay_metrics(num_given: int, num_differing: int, *, num_choices: int) -> dict[str, float]:
    """Returns metrics of replayed choices, empty if no choices were given."""
    if not num_given:
        return {}
    return {REPLAYED: num_given / num_choices, DIFFERING: num_differing / num_given}


def _relative(tokens: Tensor) -> Tensor:
    """Returns the loads relative to the mean of each layer, or 0 for layers without tokens."""
    return tokens / tokens.mean(-1, keepdim=True).clamp(min=1e-9)


# gpt-oss's experts, built one by one by Megatron: matrices [inputs, outputs], biases, an activation of alternating
# gates and values, and a router with a bias.


class _Linear(torch.nn.Module):
    """An expert's product with `kernel` [inputs, outputs].

    If the expert is split over ranks, the dispatcher sends tokens to them and sums their results.
    """

    def __init__(self, num_inputs: int, num_outputs: int, num_biases: int, config: TransformerConfig) -> None:
        super().__init__()
        settings: dict[str, Any] = {"device": parameter_device(config), "dtype": config.params_dtype}
        self.kernel = torch.nn.Parameter(torch.empty(num_inputs, num_outputs, **settings))
        self.bias = torch.nn.Parameter(torch.empty(num_biases, **settings))


class GateUp(_Linear):
    """The first matrix, split by outputs. A gate and its value are neighbours and stay together."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        **unused: Any,
    ) -> None:
        share = output_size // tp_group.size()
        super().__init__(input_size, share, share, config)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (product, bias), as Megatron's MLP expects."""
        return inputs @ self.kernel, self.bias


class Down(_Linear):
    """The second matrix, split by inputs. Every rank of an expert has the whole bias and adds its share of it."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        **unused: Any,
    ) -> None:
        super().__init__(input_size // tp_group.size(), output_size, output_size, config)
        self.num_ranks = tp_group.size()
        self.bias.shared = tp_group.rank() != 0  # type: ignore[attr-defined]  # counts once in a gradient's norm

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the product and of the bias.

        Every rank has the whole gradient of the bias, because all have the same tokens.
        """
        share: Tensor = self.bias
        if self.num_ranks > 1:
            share = share - share.detach() * (1 - 1 / self.num_ranks)
        return inputs @ self.kernel, share


class ClampedSwiGlu(torch.nn.Module):
    """The activation, with the constructor expected by Megatron's MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return clamped_swiglu(gate_up)


class BiasedRouter(SampleRouter):
    """A router with a bias of its logits."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **settings: Any
    ) -> None:
        super().__init__(config, pg_collection, **settings)
        bias = torch.empty(self.num_experts, dtype=config.params_dtype, device=parameter_device(config))
        self.bias = torch.nn.Parameter(bias)
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


# Rounded weights in Megatron's own and Transformer Engine's experts.

PRODUCT, WEIGHTS = "_forward_impl", "_get_weight_tensors"
"""Method of Megatron's linear layers with the weight as an argument, and method of Transformer Engine's grouped layers
with the weights as the result."""


def round_experts(model: torch.nn.Module, settings: FakeQuantization) -> None:
    """Makes experts in `model` round their matrices in every pass.

    Raises ConfigError if the installed Transformer Engine does not allow it.
    """
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters() if is_expert(name)}
    for name in sorted(holders):
        layer: Any = model.get_submodule(name)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            setattr(layer, PRODUCT, _of_rounded(getattr(layer, PRODUCT), settings))
        elif hasattr(layer, WEIGHTS):
            setattr(layer, WEIGHTS, _all_rounded(getattr(layer, WEIGHTS), settings))
        else:
            raise ConfigError(
                f"model.fake_quantization: the experts of the installed Transformer Engine ({type(layer).__name__}) "
                f"have no {WEIGHTS}, and rounding needs it; expected a release of Transformer Engine with it, or "
                "model.transformer_impl: local"
            )


def _of_rounded(product: Callable[..., Any], settings: FakeQuantization) -> Callable[..., Any]:
    def multiplied(*, weight: Tensor, **others: Any) -> Any:
        return product(weight=rounded(weight, settings), **others)

    return multiplied


def _all_rounded(weights: Callable[[], list[Tensor]], settings: FakeQuantization) -> Callable[[], list[Tensor]]:
    return lambda: [rounded(weight, settings) for weight in weights()]
