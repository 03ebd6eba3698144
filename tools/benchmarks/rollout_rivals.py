"""What tools/benchmarks/rollout.py compares the embedded engine with. Each draws at temperature 1, untruncated."""

import json
import logging
import os
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers
from rollout_cases import MAX_RUNNING, PROMPT_TOKENS, Case
from torch import Tensor
from transformers.generation.continuous_batching import cache as paged_cache

from rltrain.rollout.servers.sglang_process import Server, ServerSpec

START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300, 600
PAGE_TOKENS, BATCH_TOKENS = 32, 2048


def num_drawn(tokens: list[int], eos: tuple[int, ...]) -> int:
    """Up to the first end-of-sequence token, which counts."""
    return next((n for n, token in enumerate(tokens, 1) if token in eos), len(tokens))


class Generate:
    """transformers' `generate`, at most as many sequences at once as the engine runs."""

    name = "generate"

    def __init__(self, model: Any, eos: tuple[int, ...]) -> None:
        self._model, self._eos = model, eos

    def begin(self, case: Case) -> None:
        pass

    def run(self, case: Case, prompts: Tensor, seed: int) -> int:
        """Number of tokens generated."""
        torch.manual_seed(seed)
        return sum(self._generate(case, batch) for batch in prompts.split(MAX_RUNNING))

    def close(self) -> None:
        pass

    def _generate(self, case: Case, prompts: Tensor) -> int:
        sequences = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=case.max_response_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(self._eos) if case.stops else None,
            pad_token_id=self._eos[0] if self._eos else 0,
        )
        responses = sequences[:, prompts.shape[1] :]
        if not case.stops:
            return responses.numel()
        ended = torch.isin(responses, torch.tensor(self._eos)).cumsum(-1)
        return int((ended.cumsum(-1) <= 1).sum())


class ContinuousBatching:
    """transformers' continuous batching over a paged cache; what it sets up is kept from one run to the next."""

    name = "continuous_batching"

    def __init__(self, model: Any, eos: tuple[int, ...]) -> None:
        self._model, self._eos = model, eos
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        if not torch.cuda.is_available():
            # It sizes its cache by what psutil says, which rltrain does not otherwise need.
            total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            paged_cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), total_bytes, 0, 0)

    def begin(self, case: Case) -> None:
        """Make its cache for this case."""
        self.close()
        pages = -(-(PROMPT_TOKENS + case.max_response_tokens) // PAGE_TOKENS)
        self._settings = transformers.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=MAX_RUNNING * pages,
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=MAX_RUNNING,
        )

    def run(self, case: Case, prompts: Tensor, seed: int) -> int:
        """Number of tokens generated."""
        sampling = transformers.GenerationConfig(
            max_new_tokens=case.max_response_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(self._eos) if case.stops else -1,
            pad_token_id=self._eos[0] if self._eos else 0,
        )
        done = self._model.generate_batch(
            prompts.tolist(),
            generation_config=sampling,
            continuous_batching_config=self._settings,
            persistent_manager=True,
            warmup=False,
        )
        eos = self._eos if case.stops else ()
        counts = [num_drawn(output.generated_tokens, eos) for output in done.values()]
        if len(counts) != len(prompts) or not all(counts):
            raise RuntimeError(f"continuous batching finished {len(counts)} of {len(prompts)} requests")
        return sum(counts)

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()


class SGLang:
    """A server of its own, asked once per run for all sequences, with the log-prob of every token."""

    name = "sglang"

    def __init__(self, python: str, model: Path, log: Path, max_context_tokens: int, eos: tuple[int, ...]) -> None:
        self._eos = eos
        self._server = Server(
            ServerSpec(
                python=python,
                model_path=str(model),
                device="cpu",
                dtype="float32",
                tp=1,
                gpus=(),
                host="127.0.0.1",
                log_path=log,
                max_running_requests=MAX_RUNNING,
                max_context_tokens=max_context_tokens,
                needs_tokenizer=False,
                memory_saver=False,
                fp8=False,
                draws_during_syncs=False,
                args={"load_format": "auto", "sleep_on_idle": True},  # or it takes a core while others are timed
            )
        )
        self._server.start()
        self._server.wait_until_ready(START_TIMEOUT_S, lambda: None)

    def begin(self, case: Case) -> None:
        pass

    def run(self, case: Case, prompts: Tensor, seed: int) -> int:
        """Number of tokens generated."""
        sampling: dict[str, Any] = {
            "temperature": 1.0,
            "max_new_tokens": case.max_response_tokens,
            "ignore_eos": not case.stops,
        }
        if case.stops:
            sampling["stop_token_ids"] = list(self._eos)
        body = {"input_ids": prompts.tolist(), "sampling_params": [sampling] * len(prompts), "return_logprob": True}
        request = urllib.request.Request(
            f"{self._server.url}/generate",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._server.token}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return sum(len(output["output_ids"]) for output in json.load(answer))

    def close(self) -> None:
        self._server.kill()
