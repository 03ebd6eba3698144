"""The rollout: engines that draw responses from the policy."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rltrain.cluster.exchange import Shipment
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.roles.role import Job, Metrics, Role
from rltrain.rollout.embedded.engine import EmbeddedEngine, allocate_parameters
from rltrain.rollout.engine import Completion, Request, SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.seeds import request_seed


class Rollout(Role):
    """One engine per data-parallel replica; prompt group g of a step goes to engine g mod dp."""

    name = "rollout"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        config, world = self.config, job.world
        self.layout = engine_layout(job.architecture, self.grid, dtype=config.model.dtype)
        dtype = getattr(torch, config.model.dtype)
        self.parameters = allocate_parameters(self.layout, world.rank, dtype=dtype, device=world.device)
        self.engine = EmbeddedEngine(
            job.architecture,
            self.parameters,
            tp_group=job.groups[self.grid.replica(self.dp)] if self.grid.tp > 1 else None,
            max_running_requests=config.rollout.max_running_requests,
            max_context_tokens=config.rollout.max_context_tokens,
            dtype=dtype,
            device=world.device,
            tokenizer=job.prompts.decoder,
        )
        self.engine.begin_update()  # its weights are zeros until the first weight sync
        if world.rank == self.leader:
            job.prompts.report_dropped()

    def offload(self) -> None:
        self.engine.release_cache()

    def generate(self, step: int) -> Metrics:
        """Draw the step's responses from the training prompts. Collective over: the rollout's ranks."""
        sampling, batch = self.config.rollout.sampling, self.config.batch
        prompts = self.job.prompts
        rows = prompts.order.rows_for_step(step, batch.prompts_per_step)
        params = self._sampling_params(sampling.temperature, sampling.top_p, sampling.top_k)
        return self._generate("samples", prompts.train, rows, batch.samples_per_prompt, params, step)

    def generate_evaluation(self, step: int) -> Metrics:
        """Decode every held-out prompt greedily. Collective over: the rollout's ranks."""
        evaluation = self.job.prompts.evaluation
        assert evaluation is not None, "the order evaluates only where data.eval is set"
        rows = range(len(evaluation))
        params = self._sampling_params(temperature=0.0, top_p=1.0, top_k=0)
        self._generate("evaluation_samples", evaluation, rows, 1, params, step)
        return {}

    def _sampling_params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        sampling = self.config.rollout.sampling
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_response_tokens=sampling.max_response_tokens,
            stop_token_ids=self.job.architecture.eos_token_ids,
            stop=sampling.stop,
        )

    def _generate(
        self,
        transfer: str,
        prompts: PromptDataset,
        rows: Sequence[int],
        num_samples: int,
        params: SamplingParams,
        step: int,
    ) -> Metrics:
        start = time.perf_counter()
        groups = range(self.dp, len(rows), self.grid.dp)
        requests = [
            Request(
                id=group * num_samples + sample,
                prompt=prompts.prompt_tokens(rows[group]),
                seed=request_seed(self.config.seed, step, rows[group], sample),
            )
            for group in groups
            for sample in range(num_samples)
        ]
        completions = self.engine.generate(requests, params)
        experience = pack(requests, completions, rows, num_samples)
        group_tokens, response_tokens = self._totals(experience, len(rows))
        self.shipments[transfer] = Shipment(experience.columns(), group_tokens)
        seconds = time.perf_counter() - start
        return {"perf/rollout_tokens_per_s": response_tokens / seconds, "rollout/response_tokens": response_tokens}

    def _totals(self, experience: Experience, num_groups: int) -> tuple[torch.Tensor, int]:
        """([groups] tokens of every group of the step, response tokens). Collective over: the rollout's ranks."""
        totals = torch.zeros(num_groups + 1, dtype=torch.int64)
        if self.job.world.rank in self.grid.owners():
            totals.index_add_(0, experience.group_ids, experience.lengths)
            totals[-1] = experience.response_mask.sum()
        dist.all_reduce(totals, group=self.job.groups.cpu[self.grid.ranks])
        return totals[:-1], int(totals[-1])


def pack(
    requests: Sequence[Request], completions: Sequence[Completion], rows: Sequence[int], num_samples: int
) -> Experience:
    """Requests and their completions, in equal order, as Experience. `rows` [groups] are the prompts' dataset rows."""
    groups = [request.id // num_samples for request in requests]
    lengths = [len(r.prompt) + len(c.tokens) for r, c in zip(requests, completions, strict=True)]
    tokens: list[int] = []
    mask: list[bool] = []
    versions: list[int] = []
    logprobs: list[float] = []
    for request, completion in zip(requests, completions, strict=True):
        padding = len(request.prompt)
        tokens += [*request.prompt, *completion.tokens]
        mask += [False] * padding + [True] * len(completion.tokens)
        versions += [0] * padding + list(completion.policy_versions)
        logprobs += [0.0] * padding + list(completion.logprobs)
    return Experience(
        group_ids=torch.tensor(groups, dtype=torch.int64),
        prompt_ids=torch.tensor([rows[group] for group in groups], dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        policy_version=torch.tensor(versions, dtype=torch.int32),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )
