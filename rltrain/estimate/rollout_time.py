"""Seconds of generation: prompts read once, then a decode step for every token, of all responses that run."""

import sys
from dataclasses import dataclass
from math import ceil

from rltrain.config.schema import EvaluationPlan
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.links import GridLinks
from rltrain.estimate.memory import kv_bytes, state_bytes
from rltrain.estimate.planned import PlannedJob
from rltrain.estimate.shares import served_elements
from rltrain.estimate.workload import MEAN_OF_LONGEST, Workload, longest_response
from rltrain.models import Architecture
from rltrain.models.flops import attention_flops, expert_flops, forward_flops, latent_reading_flops


@dataclass(frozen=True)
class Generation:
    """Of one engine for a step's samples."""

    prefill_s: float
    decode_s: float
    num_steps: float
    running: float
    """Mean number of responses in a decode step."""


def generation(job: PlannedJob, gpu: Gpu, workload: Workload, cache_bytes: int) -> Generation:
    """Of a step on the engine with most samples, with `cache_bytes` for keys and values on each rank. All slots are
    taken while responses wait; at the end those that are longer than the mean run on, fewer and fewer, unless they are
    left to the next step."""
    num = job.samples_per_replica("rollout")
    tail = 0.0 if job.config.schedule.partial_rollouts else max(workload.longest_response - workload.response, 0.0)
    return drawing(job, "rollout", gpu, workload, cache_bytes, num, job.shape.samples_per_group, tail)


def drawing(
    job: PlannedJob,
    role: str,
    gpu: Gpu,
    workload: Workload,
    cache_bytes: int,
    num: float,
    samples_per_prompt: int,
    tail: float,
) -> Generation:
    """Of `num` samples on one engine of a role; the longest has `tail` tokens more than all have on average. Servers
    that somebody else runs are taken for one GPU each, with room for all that may run there."""
    architecture, grid = job.architectures[role], job.grids[role]
    if job.runs_elsewhere(role):
        num, cache_bytes = num / servers_per_rank(job, role), sys.maxsize
    kept = kv_bytes(architecture, 1, tp=grid.tp, item_bytes=job.item_bytes) * workload.sample
    kept += state_bytes(architecture, 1, tp=grid.tp, item_bytes=job.item_bytes)
    slots = max(1.0, min(num, job.config.served(role).max_running_requests, cache_bytes / kept))
    num_steps = num * workload.response / slots + tail
    running = num * workload.response / num_steps
    prompts = ceil(num / samples_per_prompt)
    peak = gpu.flops(job.config.model.dtype) * grid.tp
    prefill = prompts * workload.prompt * _at_peak(architecture, gpu, workload.prompt / 2) / peak
    return Generation(prefill, num_steps * decode_step(job, gpu, workload, running, role), num_steps, running)


def servers_per_rank(job: PlannedJob, role: str) -> float:
    """Of engines that somebody else runs; one where a file says which there are."""
    urls = job.config.served(role).urls
    return 1.0 if isinstance(urls, str) else len(urls) / len(job.grids[role].ranks)


def evaluating(
    job: PlannedJob, gpu: Gpu, workload: Workload, plan: EvaluationPlan, cache_bytes: int, num_prompts: int
) -> float:
    """Seconds in which so many prompts of an evaluation set are answered by all engines that do so. Responses are as
    much shorter than they may be as those of training are taken to be."""
    role = "evaluation" if job.config.evaluates_apart else "rollout"
    longest = plan.sampling.max_response_tokens
    response = longest * workload.response / longest_response(job.config)
    of_set = Workload(prompt=workload.prompt, response=response, longest_response=longest)
    num = max(1.0, num_prompts * plan.samples_per_prompt / job.grids[role].dp)
    made = drawing(job, role, gpu, of_set, cache_bytes, num, plan.samples_per_prompt, longest - response)
    return made.prefill_s + made.decode_s


def judging(job: PlannedJob, gpu: Gpu, workload: Workload) -> float:
    """Seconds of a step's questions to the judge, each as long as the sample that it shows. Answers are as much shorter
    than they may be as responses are taken to be."""
    architecture, grid, settings = job.architectures["judge"], job.grids["judge"], job.config.judge
    num, answer = float(job.samples_per_replica("judge")), settings.sampling.max_response_tokens * MEAN_OF_LONGEST
    asked = Workload(prompt=workload.sample, response=answer, longest_response=answer)
    running = min(num, settings.max_running_requests)
    peak = gpu.flops(job.config.model.dtype) * grid.tp
    prefill = num * asked.prompt * _at_peak(architecture, gpu, asked.prompt / 2) / peak
    return prefill + num * answer / running * decode_step(job, gpu, asked, running, "judge")


def decode_step(job: PlannedJob, gpu: Gpu, workload: Workload, running: float, role: str = "rollout") -> float:
    """One token of each of `running` responses: what has to be read of weights, keys and values, or what has to be
    multiplied, whichever takes longer; and what tensor parallelism sends."""
    architecture, grid, efficiency = job.architectures[role], job.grids[role], gpu.efficiency
    context = workload.prompt + workload.response / 2
    bytes_per_element = job.served_bytes_of(role) / served_elements(architecture, grid.tp, grid.ep)
    read = weights_read(architecture, grid.tp, running, grid.ep) * bytes_per_element
    read += running * kv_bytes(architecture, 1, tp=grid.tp, item_bytes=job.item_bytes) * context
    # States are read and written.
    read += 2 * running * state_bytes(architecture, 1, tp=grid.tp, item_bytes=job.item_bytes)
    wider = latent_reading_flops(architecture) - attention_flops(architecture) if architecture.mla else 0
    products = _at_peak(architecture, gpu, context) + architecture.num_layers * context * wider / efficiency.matmul
    products *= running / grid.tp
    work = max(read / gpu.memory, products / gpu.flops(job.config.model.dtype))
    link = GridLinks.of(grid, job.ranks_per_node, gpu).tp
    hidden = running * architecture.hidden_size * job.item_bytes
    sent = 2 * architecture.num_layers * link.all_reduce(hidden)
    return work + sent + architecture.num_layers * efficiency.decode_layer_s + efficiency.decode_step_s


def _at_peak(architecture: Architecture, gpu: Gpu, context: float) -> float:
    """Operations at the device's peak that take as long as those of a token that attends to `context` positions do."""
    experts = sum(architecture.sparse_layers) * expert_flops(architecture)
    others = forward_flops(architecture).of_token(context) - experts
    return others / gpu.efficiency.matmul + experts / gpu.efficiency.experts


def weights_read(architecture: Architecture, tp: int, running: float, ep: int = 1) -> float:
    """Elements of a rank's weights that a step with `running` tokens reads: of experts those that a token visits, if
    each visits any of them with equal chance. Of the embedding it reads next to nothing."""
    held = served_elements(architecture, tp, ep)
    if not architecture.tied_embeddings:
        held -= architecture.vocab_size * architecture.hidden_size // tp
    moe = architecture.moe
    if moe is None:
        return held
    experts = 3 * moe.num_experts * moe.ffn_hidden_size * architecture.hidden_size * sum(architecture.sparse_layers)
    visited = 1 - (1 - moe.top_k / moe.num_experts) ** running
    return held - experts // tp * (1 - visited)
