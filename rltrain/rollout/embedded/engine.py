"""The embedded engine: in-process generation on weights that a sync updates in place."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import ConfigError, DivergenceError
from rltrain.models import Architecture
from rltrain.offload.device_memory import check_device
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded.block_cache import BlockCache, choose_attention
from rltrain.rollout.embedded.block_tables import KvBudget, budget_of
from rltrain.rollout.embedded.decoder import Decoder, Record, Slots, choose_draw, recorder
from rltrain.rollout.embedded.generation import Generation
from rltrain.rollout.embedded.kv_cache import CacheShape, KvCache
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.parameters import Matrix, TensorParallel, adapted_matrices, quantized_matrices
from rltrain.rollout.embedded.slot_cache import SlotCache
from rltrain.rollout.engine import (
    START_FRACTION,
    Engine,
    EngineSite,
    HostedEngine,
    SamplingParams,
    Tokenizer,
    check_samples,
    expect_idle,
    served_version,
    stop_strings,
)
from rltrain.rollout.layout import adapters_of_engine, whole_engine
from rltrain.rollout.sample import Sample
from rltrain.rollout.workspace import workspace_beside_cache

# The embedded engine: in-process generation on weights that a weight sync updates in place.


class EmbeddedEngine(Engine):
    """`parameters` (SGLang names and local shapes) stay the caller's and may be rewritten in
    place between two steps; nothing derived from them is kept but the cached keys and values of running responses.
    The KV cache's memory is kept until released; with `kv_budget` it is blocks within that, else a slot per sample, as
    long as the longest. `cache_returns` tells whether whoever takes that memory away brings it back to its addresses:
    then it is not released, and what is recorded stays. `record` says how decode steps are recorded to be replayed;
    None takes what the device has, if it has anything. `matrices` are those of `parameters` that are read in another
    way than as they lie, by name. `residual_dtype` and `head_dtype` are as in config section model. With
    `record_routing` samples come back with the experts that their tokens visited (ValueError for a model without
    experts).

    `max_context_tokens` bounds prompt and response together: a response that reaches it ends truncated.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, Tensor],
        *,
        tp_group: dist.ProcessGroup | None,
        max_running_requests: int,
        max_context_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tokenizer: Tokenizer | None = None,
        record: Record | None = None,
        matrices: Mapping[str, Matrix] | None = None,
        kv_budget: KvBudget | None = None,
        cache_returns: Callable[[], bool] = lambda: False,
        residual_dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        record_routing: bool = False,
    ) -> None:
        self.policy_version: int | None = 0
        self._device = torch.device(device)
        self._max_running_requests = max_running_requests
        self._max_context_tokens = max_context_tokens
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._tensor_parallel = TensorParallel(tp_group)
        self._model = EngineModel(
            architecture,
            parameters,
            matrices or {},
            self._tensor_parallel,
            max_context_tokens,
            dtype,
            self._device,
            residual_dtype=residual_dtype,
            head_dtype=head_dtype,
            record_routing=record_routing,
        )
        self._cache_returns = cache_returns
        self.decodes_by = "a slot of its own for each sample"
        self._was_released, self._has_budget = False, kv_budget is not None
        self._slots = Slots(self._new_cache(kv_budget, dtype), max_running_requests, self._device)
        if record is None:
            record = recorder(self._device, tp_group)
            if record is not None and self._model.needs_host:
                record = None
                self.decodes_by += f"; steps are not recorded, since torch has no product for all experts in {dtype}"
        draw, reason = choose_draw(self._device)
        if reason:
            self.decodes_by += f"; not drawn by a Triton kernel: {reason}"
        self._decoder = Decoder(self._model, self._slots, draw, record)
        self._generation: Generation | None = None
        check_device(self, self._device)

    @property
    def num_unfinished(self) -> int:
        return self._generation.num_unfinished if self._generation else 0

    @property
    def num_free_slots(self) -> int:
        """How many more samples would start at the next step, as far as is known before they are submitted."""
        return self._room(self._max_running_requests)

    @property
    def num_usable(self) -> int:
        slots = self._max_running_requests
        return self._room(slots + max(1, slots // START_FRACTION))

    def _room(self, most: int) -> int:
        if self._generation is not None and self._generation.is_crowded and self.num_unfinished:
            return 0
        return max(0, most - self.num_unfinished)

    def begin_update(self) -> None:
        """Withdraw the policy version: the weights are about to be rewritten. What is running stays."""
        self.policy_version = None

    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """The parameters themselves: new weights come in place, adapters that are apart as a part of their own."""
        return self._parameters

    def arrived(self, part: int) -> None:
        """Nothing is left to do."""

    def end_update(self, version: int) -> None:
        """Serve `version` from the next step on."""
        self.policy_version = version

    @torch.inference_mode()
    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        if not samples:
            return
        generation = self._generation if self.num_unfinished else None
        check_samples(
            samples,
            sampling,
            unfinished=generation.unfinished_ids if generation else (),
            running=generation.sampling if generation else None,
            max_context_tokens=self._max_context_tokens,
        )
        generation = generation or self._new_generation(sampling)
        generation.submit(samples)
        self._generation = generation

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Admit what fits and draw one token of every running sample; those that it ends.

        Raises SyncError, on every rank, between `begin_update` and a new `policy_version`.
        Collective over: the engine's tensor-parallel group.
        """
        version = served_version(self.policy_version)
        if self._generation is None:
            return []
        with self._forgetting_on_divergence():
            return self._generation.step(version)

    @torch.inference_mode()
    def suspend(self) -> list[Sample]:
        """Take back all that is unfinished, in the order of submission, each with what it has drawn so far.

        Nothing is kept of samples that wait between two turns either: they may go on elsewhere.
        """
        self._slots.cache.parked.clear()
        generation, self._generation = self._generation, None
        if generation is None:
            return []
        with self._forgetting_on_divergence():
            return generation.unfinished()

    @torch.inference_mode()
    def progress(self, ids: Collection[int]) -> list[Sample]:
        if self._generation is None:
            return []
        with self._forgetting_on_divergence():
            return self._generation.progress(ids)

    @torch.inference_mode()
    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        if self._generation is None:
            return []
        with self._forgetting_on_divergence():
            return self._generation.withdraw(ids)

    @torch.inference_mode()
    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """The samples, finished and in their order, while nothing else is unfinished.

        Raises as `step` does. Collective over: the engine's tensor-parallel group.
        """
        version = served_version(self.policy_version)
        expect_idle(self.num_unfinished, "generate")
        self.submit(samples, sampling)
        if self._generation is None:
            return []
        with self._forgetting_on_divergence():
            finished = {sample.id: sample for sample in self._generation.run(version)}
        return [finished[sample.id] for sample in samples]

    def forget(self, ids: Collection[int]) -> None:
        """Samples that will not come back: what was kept of their keys and values is free."""
        self._slots.cache.parked.forget(ids)

    def cache_tensors(self) -> tuple[Tensor, ...]:
        """The keys and values that the cache holds memory for now."""
        return self._slots.cache.tensors()

    def release_cache(self) -> None:
        """Free the KV cache's memory; the next step allocates what it needs."""
        expect_idle(self.num_unfinished, "release_cache")
        if self._cache_returns() and self._was_released:
            self._slots.cache.parked.clear()
            self._slots.clear()
        else:  # once in any case: in the first turn other roles have not taken all of their memory yet
            self._was_released |= any(tensor.numel() for tensor in self.cache_tensors())
            self._release()

    def close(self) -> None:
        """Forget what is recorded: communicators can only be destroyed once no recorded step holds them."""
        self._decoder.forget()

    def cache_metrics(self) -> dict[str, float]:
        """Since the last call: how full the KV cache was and how many samples it made wait, where it has a budget; what
        it kept between turns, where samples have several."""
        metrics = self._slots.cache.metrics()
        if not self._has_budget:
            return metrics
        num_preempted, self._slots.num_preempted = self._slots.num_preempted, 0
        return {**metrics, "rollout/preemptions": num_preempted}

    def _new_cache(self, budget: KvBudget | None, dtype: torch.dtype) -> KvCache:
        model = self._model
        limits = (self._max_running_requests, self._max_context_tokens)
        kept = (model.routing_shape, model.state_shape)
        shape = CacheShape(model.num_attention_layers, model.attention_shape, *limits, dtype, self._device, *kept)
        if budget is None:
            return SlotCache(shape)
        like = torch.empty(0, dtype=dtype, device=self._device)
        attention, self.decodes_by = choose_attention(model.attention_shape, like)
        agree = partial(self._tensor_parallel.least, device=self._device)
        cache = BlockCache(shape, budget=budget, attention=attention, agree=agree)
        if budget.given != "auto":
            cache.num_blocks()  # refused now rather than at the first step
        return cache

    def _new_generation(self, sampling: SamplingParams) -> Generation:
        return Generation(
            self._model,
            self._slots,
            self._decoder,
            sampling,
            stop_strings(sampling.stop, self._tokenizer),
            self._max_context_tokens,
        )

    @contextmanager
    def _forgetting_on_divergence(self) -> Iterator[None]:
        """Forget all samples and the cache, which may hold NaN that a later mask would not hide."""
        try:
            yield
        except DivergenceError:
            self._generation = None
            self._release()
            raise

    def _release(self) -> None:
        self._decoder.forget()
        self._slots.release()


# rltrain's own engine on a rank of a role.

logger = logging.getLogger(__name__)


def build_embedded(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """As rollout.build says. ConfigError where <role>.kv_cache_gb cannot hold a sample, or cannot be auto."""
    config, settings, world = site.config, site.settings, site.world
    budget = budget_within(site, settings.kv_cache_gb, site.role)
    dtype = getattr(torch, config.model.dtype)
    layout = whole_engine(config, site.architecture, site.grid, site.role).layout
    weights = allocate_parameters(layout, world.rank, device=world.device)
    matrices = quantized_matrices(layout, world.rank, weights, dtype)
    adapters: dict[str, Tensor] = {}
    if lora := config.model.lora if config.keeps_adapters_apart(site.role) else None:
        beside = adapters_of_engine(config, site.architecture, site.grid, site.role).layout
        adapters = allocate_parameters(beside, world.rank, device=world.device)
        matrices = adapted_matrices(beside, world.rank, weights | adapters, matrices, lora.scale)
    engine = EmbeddedEngine(
        site.architecture,
        weights | adapters,
        tp_group=site.groups[site.ranks] if len(site.ranks) > 1 else None,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        dtype=dtype,
        device=world.device,
        tokenizer=site.tokenizer,
        matrices=matrices,
        kv_budget=budget,
        cache_returns=lambda: keeps_recordings(site, kv_cache),
        residual_dtype=getattr(torch, config.model.residual),
        head_dtype=getattr(torch, config.model.head),
        record_routing=config.model.router_replay == "rollout" and site.role == "rollout",
    )
    kv_cache = MemoryPart(engine.cache_tensors, forget=leave)
    if world.device.type == "cuda" and world.rank == site.grid.owner(0):
        logger.warning("%s.engine embedded decodes over %s", site.role, engine.decodes_by)
    engine.begin_update()  # its weights are zeros until the first update
    parts = {"weights": MemoryPart(weights.values), "kv_cache": kv_cache}
    if adapters:
        parts |= {"weights": MemoryPart(adapters.values), "base": MemoryPart(weights.values)}
    return HostedEngine(engine, parts, engine.cache_metrics)


def keeps_recordings(site: EngineSite, kv_cache: MemoryPart) -> bool:
    """Whether steps that were recorded are valid when the engine has left and come back: what they read lies where it
    was, and so do the communicators that they hold."""
    released = site.config.residency.communicators == "release" and len(site.ranks) > 1
    return kv_cache.memory.keeps_addresses and not released


def budget_within(site: EngineSite, given: float | str, role: str) -> KvBudget | None:
    """For the engine of a site, whose config section is `role`; ConfigError where auto cannot be known."""
    workspace_bytes = workspace_beside_cache(site.config, site.architecture, site.grid, role)
    budget = budget_of(given, site.world.device, workspace_bytes)
    if budget and budget.given == "auto" and site.others and not site.leaves:
        raise ConfigError(
            f"{role}.kv_cache_gb: got auto for an engine that stays on its GPU beside {', '.join(site.others)}; "
            f"expected a number, since it cannot see what those will need, or {role}.offload: true"
        )
    return budget
