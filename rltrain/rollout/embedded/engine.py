"""The embedded engine. It generates in this process, on weights updated in place by weight syncs."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.data.images import ImageRules
from rltrain.errors import ConfigError, DivergenceError
from rltrain.models import Architecture
from rltrain.models.vision import Vision
from rltrain.offload.device_memory import check_device
from rltrain.offload.memory_parts import MemoryPart, reserved_memory
from rltrain.reshard.copy_table import Zeros, allocate_parameters
from rltrain.rollout.embedded.block_cache import BlockCache, choose_attention
from rltrain.rollout.embedded.block_tables import GB, KvBudget, budget_of
from rltrain.rollout.embedded.decoder import Decoder, Record, Slots, choose_draw, recorder
from rltrain.rollout.embedded.generation import Generation
from rltrain.rollout.embedded.image_features import EngineImages, ImageLimits, tower_of
from rltrain.rollout.embedded.kv_cache import CacheShape, KvCache
from rltrain.rollout.embedded.layers import choose_kernels
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

# The engine.


class EmbeddedEngine(Engine):
    """Generates on `parameters`, named and shaped as in SGLang.

    The parameters belong to the caller and may be rewritten in place between two steps. Nothing derived from them is
    kept except cached keys and values of running responses. `max_context_tokens` limits prompt and response together; a
    response that reaches it is truncated.

    `kv_budget` limits the KV cache, which then consists of blocks. Without it each sample has a slot as long as the
    longest one. The memory is kept until it is released. `cache_returns` reports whether that memory will return to the
    same addresses after others take it. It is not released then, and recorded steps stay valid.

    `images` encodes the images of samples on the same parameters. `zeros` allocates the KV cache on another way than
    torch.

    `record` records decode steps for replay; None uses the device's method, if any. `matrices` has the parameters with
    a special way of reading, by name. `residual_dtype` and `head_dtype` are as in config section model. With
    `record_routing` samples return with the experts of their tokens. Raises ValueError if the model has no experts
    then. `ahead` is the number of steps launched before the results of a step are read, 0 or 1. None is 1 on GPUs
    if the cache allows it.
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
        images: EngineImages | None = None,
        zeros: Zeros | None = None,
        ahead: int | None = None,
    ) -> None:
        self._zeros = zeros
        self.policy_version: int | None = 0
        self._device = torch.device(device)
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._tokenizer, self._cache_returns = tokenizer, cache_returns
        self._parameters, self._images = parameters, images
        self._tensor_parallel = TensorParallel(tp_group)
        kernels, against_kernels = choose_kernels(self._device, dtype)
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
            kernels=kernels,
        )
        self.decodes_by = "one slot per sample"
        self._was_released, self._has_budget = False, kv_budget is not None
        cache = self._new_cache(kv_budget, dtype)
        self._slots = Slots(cache, max_running_requests, max_context_tokens, self._device, ahead)
        if record is None:
            record = recorder(self._device, tp_group)
            if record is not None and self._model.needs_host:
                record = None
                self.decodes_by += f"; steps are not recorded, because torch has no grouped product in {dtype}"
        if against_kernels:
            self.decodes_by += f"; layers without Triton kernels: {against_kernels}"
        draw, reason = choose_draw(self._device)
        if reason:
            self.decodes_by += f"; sampling without a Triton kernel: {reason}"
        self._decoder = Decoder(self._model, self._slots, draw, record)
        self._generation: Generation | None = None
        check_device(self, self._device, on_host=["on_host"])

    @property
    def num_unfinished(self) -> int:
        return self._generation.num_unfinished if self._generation else 0

    @property
    def num_free_slots(self) -> int:
        """Number of further samples that could start at the next step, as far as known before their submission."""
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
        """Withdraws the policy version, because the weights are about to be rewritten. Running samples stay.

        Waits for a step in flight, which reads the weights.
        """
        self.policy_version = None
        if self._generation:
            self._generation.wait()
        self._slots.cache.forget_prompts()
        if self._images:
            self._images.changed()

    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Returns the parameters themselves, since new weights are written in place. Separate adapters are a part of
        their own."""
        return self._parameters

    def arrived(self, part: int) -> None:
        """Does nothing, since the weights are already in place."""

    def end_update(self, version: int) -> None:
        """Serves `version` from the next step on."""
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
        if self._images:
            self._images.check(samples)
        elif seeing := [sample.id for sample in samples if sample.images]:
            raise ValueError(f"sample {seeing[0]} has images; expected an engine with a vision tower (model.vision)")
        generation = generation or self._new_generation(sampling)
        generation.submit(samples)
        self._generation = generation

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Admits waiting samples, generates one token for every running sample and returns the finished ones.

        On GPUs the token may still be in flight. The next step returns the samples that it finishes.

        Raises SyncError on every rank between `begin_update` and `end_update`. Collective over: the engine's
        tensor-parallel group.
        """
        version = served_version(self.policy_version)
        if self._generation is None:
            return []
        with self._forgetting_on_divergence():
            return self._generation.step(version)

    @torch.inference_mode()
    def suspend(self) -> list[Sample]:
        """Removes and returns all unfinished samples in the order of submission, each with its tokens so far.

        Nothing is kept of samples between two turns either, because they may continue elsewhere, nor of prompts.
        """
        self._slots.cache.parked.clear()
        self._slots.cache.forget_prompts()
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
        """Returns `samples` finished, in their order. Raises ValueError if anything else is unfinished.

        Raises the errors of `step`. Collective over: the engine's tensor-parallel group.
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
        """Frees the keys and values kept for these samples. They will not return."""
        self._slots.cache.parked.forget(ids)

    def forget_images(self) -> None:
        """Drops the features of images encoded before."""
        if self._images:
            self._images.forget()

    def cache_tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors with memory for keys and values at present."""
        return self._slots.cache.tensors()

    def release_cache(self) -> None:
        """Frees the memory of the KV cache. The next step allocates it again."""
        expect_idle(self.num_unfinished, "release_cache")
        self.forget_images()
        if self._cache_returns() and self._was_released:
            self._slots.cache.parked.clear()
            self._slots.cache.forget_prompts()
            self._slots.clear()
        else:  # always the first time, because other roles have not allocated all of their memory yet
            self._was_released |= any(tensor.numel() for tensor in self.cache_tensors())
            self._release()

    def close(self) -> None:
        """Drops the recorded steps. Communicators can only be destroyed once no recorded step holds them."""
        if self._generation:
            self._generation.wait()
        self._decoder.forget()

    def cache_metrics(self) -> dict[str, float]:
        """Returns metrics since the last call: where tokens of contexts came from, the peak use and preemptions of a
        limited cache, and reuse between turns."""
        metrics = self._slots.head_tokens.metrics() | self._slots.cache.metrics()
        if self._images:
            metrics |= self._images.metrics()
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
        cache = BlockCache(shape, budget=budget, attention=attention, agree=agree, zeros=self._zeros)
        if budget.given != "auto":
            cache.num_blocks()  # raises errors now rather than at the first step
        return cache

    def _new_generation(self, sampling: SamplingParams) -> Generation:
        return Generation(
            self._model,
            self._slots,
            self._decoder,
            sampling,
            stop_strings(sampling.stop, self._tokenizer),
            self._max_context_tokens,
            self._images,
        )

    @contextmanager
    def _forgetting_on_divergence(self) -> Iterator[None]:
        """Drops all samples and the cache on divergence. The cache may hold NaN, which a later mask would not hide."""
        try:
            yield
        except DivergenceError:
            if self._generation:
                self._generation.wait()
            self._generation = None
            self._release()
            raise

    def _release(self) -> None:
        self._decoder.forget()
        self._slots.release()


# The engine on a rank of a role.

logger = logging.getLogger(__name__)


def build_embedded(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """Builds the embedded engine (see rollout.build). Raises ConfigError if <role>.kv_cache_gb is unusable.

    It must hold a sample, and it cannot be auto for an engine that shares its GPU permanently.
    """
    config, settings, world = site.config, site.settings, site.world
    budget = budget_within(site, settings.kv_cache_gb, site.role)
    dtype = getattr(torch, config.model.dtype)
    layout = whole_engine(config, site.architecture, site.grid, site.role).layout
    reserved = reserved_memory(world.device) if site.leaves and config.residency.allocator == "auto" else None
    zeros = reserved.zeros if reserved else None
    weights = allocate_parameters(layout, world.rank, device=world.device, zeros=zeros)
    matrices = quantized_matrices(layout, world.rank, weights, dtype)
    adapters: dict[str, Tensor] = {}
    if lora := config.model.lora if config.keeps_adapters_apart(site.role) else None:
        beside = adapters_of_engine(config, site.architecture, site.grid, site.role).layout
        adapters = allocate_parameters(beside, world.rank, device=world.device, zeros=zeros)
        matrices = adapted_matrices(beside, world.rank, weights | adapters, matrices, lora.scale)
    images = None
    if site.architecture.vision is not None:
        images = images_of(site, site.architecture.vision, weights, matrices)
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
        images=images,
        zeros=zeros,
    )
    kv_cache = MemoryPart(engine.cache_tensors, forget=leave)
    if world.device.type == "cuda" and world.rank == site.grid.owner(0):
        logger.warning("%s.engine embedded decodes over %s", site.role, engine.decodes_by)
    engine.begin_update()  # the weights are zeros until the first update
    parts = {"weights": MemoryPart(weights.values), "kv_cache": kv_cache}
    if adapters:
        parts |= {"weights": MemoryPart(adapters.values), "base": MemoryPart(weights.values)}
    if reserved:
        for part in parts.values():
            part.memory = reserved
    return HostedEngine(engine, parts, engine.cache_metrics)


def images_of(
    site: EngineSite, vision: Vision, weights: Mapping[str, Tensor], matrices: Mapping[str, Matrix]
) -> EngineImages:
    """Returns the encoder of the site's images on the tower's `weights`, with the adapters of `matrices`.

    Raises ConfigError for an engine on several nodes, and CheckpointError if the checkpoint has no usable image
    processor.
    """
    if site.num_nodes > 1:
        raise ConfigError(
            f"{site.role}.parallel.tp: got an engine on {site.num_nodes} nodes with model.vision; expected engines "
            "within a node, because its ranks read images from a folder of the node. Lower tp"
        )
    folder, key = site.config.checkpoint_of(site.role)
    settings = site.config.model_of(site.role).vision
    assert settings is not None and site.images is not None, "an engine with a tower has settings and a store"
    rules = ImageRules.read(Path(folder), site.config.data.images, key)
    return EngineImages(
        vision,
        tower_of(vision, Path(folder), weights, matrices, site.world.device),
        site.images,
        (rules.mean, rules.std),
        ImageLimits(settings.max_patches, settings.engine_cache_gb * GB, trains=not site.config.freezes_tower),
        site.world.device,
    )


def keeps_recordings(site: EngineSite, kv_cache: MemoryPart) -> bool:
    """Returns whether recorded steps stay valid after the engine leaves and returns. Their memory and communicators
    must stay."""
    released = site.config.residency.communicators == "release" and len(site.ranks) > 1
    return kv_cache.memory.keeps_addresses and not released


def budget_within(site: EngineSite, given: float | str, role: str) -> KvBudget | None:
    """Returns the KV budget of a site's engine with config section `role`. Raises ConfigError if auto cannot be
    determined."""
    workspace_bytes = workspace_beside_cache(site.config, site.architecture, site.grid, role)
    budget = budget_of(given, site.world.device, workspace_bytes)
    if budget and budget.given == "auto" and site.others and not site.leaves:
        raise ConfigError(
            f"{role}.kv_cache_gb: got auto for an engine that stays on its GPU beside {', '.join(site.others)}; "
            f"expected a number, because the later need of those is unknown, or {role}.offload: true"
        )
    return budget
