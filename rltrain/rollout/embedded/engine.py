"""The embedded engine: in-process generation on weights that a weight sync updates in place."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import ConfigError, DataError, DivergenceError, SyncError
from rltrain.reshard.families import Architecture
from rltrain.reshard.layout import Layout
from rltrain.rollout.embedded.generation import Generation
from rltrain.rollout.embedded.kv_cache import KvCache
from rltrain.rollout.embedded.model import EngineModel
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.stop_strings import StopStrings, Tokenizer
from rltrain.rollout.engine import Completion, Request, SamplingParams


def allocate_parameters(
    layout: Layout, rank: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Zeroed tensors of every parameter that `rank` holds in `layout`, by name."""
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in layout.on(rank).parameters}


class EmbeddedEngine:
    """Implements `Engine`. `parameters` (SGLang names and local shapes) stay the caller's and may be rewritten in
    place between calls of `generate`; nothing derived from them is kept. The KV cache's memory is kept until released.

    `max_context_tokens` bounds prompt and response together: a response that reaches it ends with reason "length".
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
    ) -> None:
        self.policy_version: int | None = 0
        self._device = torch.device(device)
        self._max_running_requests = max_running_requests
        self._max_context_tokens = max_context_tokens
        self._tokenizer = tokenizer
        self._model = EngineModel(
            architecture, parameters, TensorParallel(tp_group), max_context_tokens, dtype, self._device
        )
        self._cache = KvCache(
            self._model.num_layers,
            self._model.num_kv_heads,
            self._model.head_dim,
            max_context_tokens,
            dtype,
            self._device,
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Completions in the order of `requests`. Collective over: the engine's tensor-parallel group.

        Raises SyncError, on every rank, between `begin_update` and a new `policy_version`.
        """
        version = self.policy_version
        if version is None:
            raise SyncError(
                "the engine was asked to generate while its weights are incomplete: a weight sync has not been made "
                "yet, or one has begun and not ended. Expected a weight_sync that succeeds before every generate"
            )
        if not requests:
            return []
        self._check_prompts(requests)
        stop_strings = self._stop_strings(sampling, len(requests))
        num_slots = min(self._max_running_requests, len(requests))
        self._cache.prepare(num_slots)
        generation = Generation(
            self._model,
            self._cache,
            requests,
            sampling,
            stop_strings,
            num_slots=num_slots,
            max_context_tokens=self._max_context_tokens,
        )
        try:
            return generation.run(version)
        except DivergenceError:
            self._cache.release()  # it may hold NaN, which a later mask would not hide
            raise

    def begin_update(self) -> None:
        """Withdraw the policy version: the weights are about to be rewritten."""
        self.policy_version = None

    def release_cache(self) -> None:
        """Free the KV cache's memory; the next generation allocates what it needs."""
        self._cache.release()

    def _check_prompts(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not 0 < len(request.prompt) < self._max_context_tokens:
                raise DataError(
                    f"The prompt of request {request.id} has {len(request.prompt)} tokens; expected at least 1 and "
                    f"fewer than rollout.max_context_tokens = {self._max_context_tokens}, so that a response fits. "
                    "Raise rollout.max_context_tokens or lower data.max_prompt_tokens."
                )

    def _stop_strings(self, sampling: SamplingParams, num_requests: int) -> StopStrings | None:
        if not sampling.stop:
            return None
        if self._tokenizer is None:
            raise ConfigError(
                f"rollout.sampling.stop = {list(sampling.stop)} needs the model's tokenizer to decode responses, and "
                "there is none. Put tokenizer files into model.path, or leave rollout.sampling.stop empty."
            )
        return StopStrings(self._tokenizer, sampling.stop, num_requests)
