"""Estimates the seconds of passes, optimizer steps and generation."""

import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

from rltrain.config.schema import EvaluationPlan
from rltrain.models import Architecture
from rltrain.models.flops import (
    BACKWARD,
    attention_flops,
    expert_flops,
    forward_flops,
    latent_reading_flops,
    layer_flops,
    mlp_flops,
)
from rltrain.planning.activation_memory import Activations
from rltrain.planning.hardware import Gpu, GridLinks
from rltrain.planning.image_estimates import encoding_s
from rltrain.planning.memory import kv_bytes, recomputed_logits, state_bytes
from rltrain.planning.optimizer_memory import (
    gathering_s,
    learned_elements,
    learns_adapters,
    orthogonalizing_s,
    sharded_elements,
    trained_settings,
)
from rltrain.planning.planned import (
    MEAN_OF_LONGEST,
    Computed,
    PlannedJob,
    Workload,
    layers_of_chunks,
    layers_of_stage,
    longest_response,
    served_elements,
)
from rltrain.runtime.grid import Grid

# Seconds of a forward pass, a backward pass and an optimizer step of a role's model.

FP32 = 4
EXPERT_TILE = 128
"""Rows per tile of a grouped product. On average half of every expert's last tile is padding."""
COLLECTIVES_PER_LAYER = 2
"""Tensor-parallel collectives per pass through a layer, each of the layer's hidden states."""
SHORT_TOKENS, SHORTEST_FRACTION = 128, 0.6
"""Padded sequences share a batch if the longest has at most SHORT_TOKENS tokens, or if the shortest has at least
SHORTEST_FRACTION of its length."""
BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_REPLICA = 40_000_000, 1_000_000
"""Default elements of gradients that Megatron reduces at once. It takes the larger of both numbers, the second one
times the replicas."""
UPDATE_COLLECTIVES = 8
"""Small collectives among replicas in an optimizer step: norms, finiteness, divisors, metrics."""
MOVED_OF_HIDDEN, MOVED_OF_HEADS, MOVED_OF_MLP = (8, 8), (2, 3), (3, 5)
"""Elements that a layer's fused kernels read and write (forward, backward): for each element of the hidden state, of
queries, keys and values, and of the MLP. They are the counts of tools/benchmarks/launches.py."""
LAUNCHES_OF_PASS = 11
"""A third of the launches of a layer's forward and backward."""
MOVED_OF_LOGITS = (1, 2)
"""The same for each logit. Their statistics read it, and their gradient takes its place."""
ACCUMULATED_BYTES = 8
"""Bytes per parameter and micro-batch: products read and write fp32 sums of gradients."""
OPTIMIZER_BYTES = 2 * (2 * FP32) + FP32
"""Bytes per element of a rank's share: both moments are read and written, and the gradient is read."""


@dataclass(frozen=True)
class MicroBatchTime:
    """The seconds of a micro-batch on a pipeline stage.

    The device takes `per_token` for each token and `each` besides. The host takes `host`, at the same time if
    `launches_ahead`.
    """

    per_token: float
    each: float
    host: float
    launches_ahead: bool

    def of(self, tokens: float) -> float:
        """Returns the seconds of `tokens` tokens."""
        device = self.per_token * tokens + self.each
        return max(device, self.host) if self.launches_ahead else device + self.host


@dataclass(frozen=True)
class TrainingTime:
    """The times of `role`'s model on its grid."""

    job: PlannedJob
    role: str
    gpu: Gpu
    workload: Workload

    @cached_property
    def architecture(self) -> Architecture:
        return self.job.architectures[self.role]

    @cached_property
    def grid(self) -> Grid:
        return self.job.grids[self.role]

    @cached_property
    def links(self) -> GridLinks:
        return GridLinks.of(self.grid, self.job.ranks_per_node, self.gpu)

    def evaluating(self, share: float) -> float:
        """Returns the seconds of one forward pass over `share` of a step's samples."""
        return self._passes(share, 1, backward=False) + self._encoding(share, trains=False)

    def accumulating(self, share: float) -> float:
        """Returns the seconds of the gradients of `share` of a step's samples."""
        batch = self.job.config.batch
        passes = self._passes(share, batch.mini_batches, backward=True)
        return batch.epochs * (passes + self._encoding(share, trains=True))

    def _encoding(self, share: float, *, trains: bool) -> float:
        """Returns the seconds of the vision tower. The samples of a group share their images."""
        prompts = self.job.config.batch.prompts_per_step / self.grid.dp * share
        return encoding_s(self.job, self.role, self.gpu, self.workload, prompts, trains=trains)

    def optimizer_steps(self) -> float:
        """Returns the seconds of all optimizer steps of a step: reducing gradients, updating and gathering weights.

        Communication that overlaps with passes counts only if it takes longer than they do. It does not slow them down.
        """
        return max(self._optimizer_steps(stage) for stage in range(self.grid.pp))

    def _optimizer_steps(self, stage: int) -> float:
        settings, times = trained_settings(self.job, self.role), self.job.shape.updates_per_step
        item, master = self.job.item_bytes, 2 * FP32 + self.job.item_bytes if self.job.item_bytes < FP32 else 2 * FP32
        optimized, hosted = sharded_elements(self.job, self.role, stage), float(settings.optimizer.cpu_offload)
        step = (1 - hosted) * optimized * (OPTIMIZER_BYTES + master) / self.gpu.memory
        step += hosted * optimized * max(1 / self.gpu.efficiency.host_adam, FP32 / self.gpu.host)
        told = UPDATE_COLLECTIVES * self.links.dp.latency_s * (self.links.dp.size > 1)
        besides = self.gpu.efficiency.update_s + told
        stepping = times * (step + besides + orthogonalizing_s(self.job, self.role, stage, self.gpu))
        if self.grid.is_sharded:  # every micro-batch reduces gradients and gathers weights
            return stepping
        held = learned_elements(self.job, self.role, stage)
        reduced = gathered = 0.0
        for elements, link in ((sum(held.dense), self.links.dp), (sum(held.experts), self.links.expert_dp)):
            if settings.distributed_optimizer:
                reduced += link.gather(elements * FP32)
                gathered += link.gather(elements * item)
            else:
                reduced += link.all_reduce(elements * FP32)
        shared = times * (reduced + gathered)
        if settings.overlap is not False and not self._accumulates:
            forward_s, backward_s = self._passes_of_one_micro_batch(stage)
            last_bucket = min(1.0, self._bucket_elements() / held.total)
            shared = times * max(reduced - backward_s, reduced * last_bucket)
            shared += gathered + (times - 1) * max(gathered - forward_s, 0.0)
        return shared + stepping

    @property
    def _accumulates(self) -> bool:
        """Whether gradients are computed in tasks separate from the optimizer step."""
        shape = self.job.shape
        return shape.accumulates_actor if self.role == "actor" else shape.accumulates_critic

    def _bucket_elements(self) -> float:
        given = trained_settings(self.job, self.role).gradient_bucket_mb
        if given is not None:
            return given * 2**20 / FP32
        return max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_REPLICA * self.grid.dp * self.grid.cp)

    def _passes_of_one_micro_batch(self, stage: int) -> tuple[float, float]:
        """Returns the seconds (forward, backward) of one micro-batch on a stage."""
        computed = self.computed(backward=True)
        samples = self.job.samples_per_replica(self.role) / self.job.config.batch.mini_batches
        tokens = samples * self.workload.sample * computed.share
        both = self._stage(stage, computed, True).of(tokens / self.num_micro_batches(tokens, computed))
        return both / (1 + BACKWARD), both * BACKWARD / (1 + BACKWARD)

    def _passes(self, share: float, times: int, *, backward: bool) -> float:
        """Returns the seconds of `share` of a step's samples in `times` parts.

        Each part runs by 1F1B: its micro-batches, and the filling and emptying of the pipeline.
        """
        computed = self.computed(backward=backward)
        samples = self.job.samples_per_replica(self.role) * share / times
        tokens = samples * self.workload.sample * computed.share
        num = self.num_micro_batches(tokens, computed)
        filling = (self.grid.pp - 1) / self.grid.vpp
        stages = (self._stage(stage, computed, backward) for stage in range(self.grid.pp))
        return times * (num + filling) * max(stage.of(tokens / num) for stage in stages)

    def computed(self, *, backward: bool) -> Computed:
        """Returns the computed part of samples of mean length."""
        return self.job.computed(self.role, self.workload.prompt, self.workload.response, trains=backward)

    def num_micro_batches(self, tokens: float, computed: Computed) -> int:
        """Returns the number of micro-batches with `tokens` computed tokens. Samples that share a prompt stay
        together."""
        limit = max(self.job.micro_batch_limit(self.role), self.workload.sample)
        if computed.share < 1:
            limit = max(limit // computed.together, 1) * computed.together
        return max(1, ceil(tokens / limit))

    def _stage(self, stage: int, computed: Computed, backward: bool) -> MicroBatchTime:
        a, gpu, model = self.architecture, self.gpu, self.job.config.model
        recompute, layers = model.recomputed, layers_of_stage(a, self.grid, stage)
        repeats = partial(self.job.repeats, self.role)
        experts = sum(layers) * expert_flops(a)
        products = sum(layer_flops(a, sparse) for sparse in layers) - experts
        head = forward_flops(a).head if stage == self.grid.pp - 1 else 0
        attention = len(layers) / a.num_layers * self._attention_flops(computed)
        times = 1 + BACKWARD if backward else 1
        gradients = 1 if learns_adapters(self.job, self.role) else BACKWARD  # frozen: of inputs only
        multiplied = 1 + backward * gradients
        whole = sum(recompute.full_layers(len(chunk)) for chunk in layers_of_chunks(a, self.grid, stage))
        repeated = backward * whole / (len(layers) or 1)
        of_layers = products / gpu.efficiency.matmul + experts * self._unevenness() / gpu.efficiency.experts
        attended = times + (backward if repeats("core_attn") else repeated)
        of_attention = attended * attention / gpu.efficiency.attention
        of_head = (multiplied + backward * recomputed_logits(self.job, self.role)) * head
        at_peak = (multiplied + repeated) * of_layers + of_head / gpu.efficiency.matmul + of_attention
        if backward and repeats("mlp"):
            at_peak += (len(layers) - sum(layers)) * mlp_flops(a) / gpu.efficiency.matmul
        if backward and repeats("moe"):
            at_peak += experts * self._unevenness() / gpu.efficiency.experts
        flops = gpu.flops(model.dtype) * self.grid.tp * self.grid.cp
        passes = len(layers) * (1 + backward + (backward if repeats("core_attn") else repeated))
        per_token = at_peak / flops + self._moved_by_attention(passes, of_attention / flops)
        per_token += self._moved_by_kernels(layers, bool(head), repeated, backward) / gpu.memory
        if backward:  # to the host and back, during the computation
            per_token = max(per_token, 2 * Activations(self.job, self.role, stage).leaving() / gpu.host)
        walks = 1 + backward + repeated
        latencies = walks * COLLECTIVES_PER_LAYER * len(layers) * self.links.tp.latency_s * (self.grid.tp > 1)
        if self.links.ep.size > 1:
            latencies += walks * 2 * sum(layers) * (gpu.efficiency.dispatch_s + self.links.ep.latency_s)
        latencies += walks * len(layers) * self.links.cp.latency_s * (self.grid.cp > 1)
        host = (times + repeated) * len(layers) * gpu.efficiency.layer_s
        if backward:
            launched = sum(Activations(self.job, self.role, stage).made_again(sparse)[0] for sparse in layers)
            host += launched / LAUNCHES_OF_PASS * gpu.efficiency.layer_s
        host += (1 + backward) * gpu.efficiency.micro_batch_s
        each = latencies
        if backward:
            each += learned_elements(self.job, self.role, stage).total * ACCUMULATED_BYTES / gpu.memory
        if self.grid.is_sharded:  # only the time beyond the computation
            collectives = gathering_s(self.job, self.role, self.links, backward=backward)
            each += max(0.0, collectives - per_token * self.job.micro_batch_rows(self.role))
        per_token += walks * self._moved(layers) / self.grid.cp
        return MicroBatchTime(per_token, each, host, gpu.efficiency.launches_ahead)

    def _moved_by_kernels(self, layers: tuple[bool, ...], has_head: bool, repeated: float, backward: bool) -> float:
        """Returns the bytes per token and rank that kernels move between products: norms, rotations, activations and
        log-probs. `repeated` is the number of further forward passes through the layers."""
        a, tp, moe = self.architecture, self.grid.tp, self.architecture.moe
        of_experts = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size if moe else 0
        ways = [(0, 1 + repeated), (1, 1)] if backward else [(0, 1)]
        elements = 0.0
        for way, times in ways:
            hidden = MOVED_OF_HIDDEN[way] * a.hidden_size / (tp if self._is_split_between_layers else 1)
            heads = MOVED_OF_HEADS[way] * (a.query_size + 2 * a.kv_size) / tp
            mlps = sum(of_experts if sparse else a.ffn_hidden_size for sparse in layers) * MOVED_OF_MLP[way] / tp
            elements += times * (len(layers) * (hidden + heads) + mlps)
        moved = elements * self.job.item_bytes
        if backward:
            moved += sum(Activations(self.job, self.role, 0).made_again(sparse)[1] for sparse in layers)
        if has_head:
            moved += sum(MOVED_OF_LOGITS[: len(ways)]) * a.vocab_size / tp * self.job.logit_bytes
        return self.gpu.efficiency.moved * moved / self.grid.cp

    @property
    def _is_split_between_layers(self) -> bool:
        """Whether each tensor-parallel rank has a part of the tokens between layers."""
        parallel = getattr(self.job.config, self.role).parallel or self.job.config.actor.parallel
        return bool(parallel.sequence_parallel)

    def _attention_flops(self, computed: Computed) -> float:
        """Returns the FLOPs per computed token of attention in all layers.

        Without a kernel for packed sequences, these are padded to the longest one of similar length. Short ones are
        padded to the longest of all.
        """
        flops, mean = forward_flops(self.architecture), self.workload.sample
        of_token = flops.of_attention(computed.context)
        if self.job.attends_packed:
            return of_token
        longest = self.workload.prompt + self.workload.longest_response
        width = longest if longest <= SHORT_TOKENS else mean * 2 / (1 + SHORTEST_FRACTION)
        return width / mean * flops.of_attention(width / 2) / flops.of_attention(mean / 2) * of_token

    def _moved_by_attention(self, passes: float, attention_s: float) -> float:
        """Returns the seconds per token in which context parallelism sends keys and values, heads, or their gradients.

        `passes` is the number of passes through attention. On a ring only the time beyond the simultaneous attention
        counts.
        """
        a, model, link = self.architecture, self.job.config.model, self.links.cp
        if link.size == 1:
            return 0.0
        values = a.num_heads * a.mla.value_head_dim if a.mla else a.kv_size
        keys = a.query_size if a.mla else a.kv_size
        item = self.job.item_bytes / self.grid.tp
        if model.cp_communication == "all_to_all":
            output = values if a.mla else a.query_size
            return passes * link.scattered((a.query_size + keys + values + output) * item / link.size)
        sent = passes * (keys + values) * item * (link.size - 1) / link.size / link.bandwidth
        return sent if self.job.attends_locally(self.role) else max(sent - attention_s, 0.0)

    def _unevenness(self) -> float:
        """Returns the factor on products of experts for uneven loads and partly filled tiles."""
        moe, ep = self.architecture.moe, self.links.ep.size
        if moe is None:
            return 1.0
        tokens = self.job.micro_batch_rows(self.role) * ep * moe.top_k / moe.num_experts
        return (1 + EXPERT_TILE / 2 / tokens) * (self.gpu.efficiency.expert_imbalance if ep > 1 else 1.0)

    def _moved(self, layers: tuple[bool, ...]) -> float:
        """Returns the seconds per token of moving hidden states between ranks in one walk through a stage's layers."""
        hidden, tp, ep = self.architecture.hidden_size * self.job.item_bytes, self.links.tp, self.links.ep
        seconds = 2 * COLLECTIVES_PER_LAYER * len(layers) * hidden * (tp.size - 1) / tp.size / tp.bandwidth
        if self.architecture.moe:
            sent = self.architecture.moe.top_k * hidden / self.grid.tp * self.gpu.efficiency.expert_imbalance
            seconds += 2 * sum(layers) * ep.scattered(sent)  # there and back
        if self.grid.pp > 1:
            seconds += self.grid.vpp * self.architecture.hidden_size * self.job.residual_bytes / self.links.pp
        return seconds


# Seconds of generation: prefill of all prompts, then a decode step for every token of the running responses.


def generation(job: PlannedJob, gpu: Gpu, workload: Workload, cache_bytes: int) -> float:
    """Returns the seconds of a step on the engine with the most samples. `cache_bytes` are for keys and values on each
    rank.

    All slots are in use while responses wait. At the end, ever fewer long responses continue, unless partial rollouts
    leave them to the next step.
    """
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
) -> float:
    """Returns the seconds of `num` samples on one engine of a role. The longest has `tail` tokens more than the mean.

    A server at a URL is assumed to be one GPU with room for all its samples.
    """
    architecture, grid = job.architectures[role], job.grids[role]
    if job.runs_elsewhere(role):
        num, cache_bytes = num / servers_per_rank(job, role), sys.maxsize
    kept = kv_bytes(architecture, 1, tp=grid.tp, item_bytes=job.item_bytes) * workload.sample
    kept += state_bytes(architecture, 1, tp=grid.tp, item_bytes=job.item_bytes)
    slots = max(1.0, min(num, job.config.served(role).max_running_requests, cache_bytes / kept))
    num_steps = num * workload.response / slots + tail
    running = num * workload.response / num_steps  # mean over the decode steps
    prompts = ceil(num / samples_per_prompt)
    peak = gpu.flops(job.config.model.dtype) * grid.tp
    prefill = prompts * workload.prompt * _at_peak(architecture, gpu, workload.prompt / 2) / peak
    prefill += encoding_s(job, role, gpu, workload, prompts, trains=False)
    return prefill + num_steps * decode_step(job, gpu, workload, running, role)


def servers_per_rank(job: PlannedJob, role: str) -> float:
    """Returns the servers at URLs per rank. It is 1 if a file lists the servers."""
    urls = job.config.served(role).urls
    return 1.0 if isinstance(urls, str) else len(urls) / len(job.grids[role].ranks)


def evaluating(
    job: PlannedJob, gpu: Gpu, workload: Workload, plan: EvaluationPlan, cache_bytes: int, num_prompts: int
) -> float:
    """Returns the seconds in which all evaluating engines answer `num_prompts` prompts of an evaluation set.

    The mean response is the same share of its limit as in training.
    """
    role = "evaluation" if job.config.evaluates_apart else "rollout"
    longest = plan.sampling.max_response_tokens
    response = longest * workload.response / longest_response(job.config)
    of_set = replace(workload, response=response, longest_response=longest)
    num = max(1.0, num_prompts * plan.samples_per_prompt / job.grids[role].dp)
    return drawing(job, role, gpu, of_set, cache_bytes, num, plan.samples_per_prompt, longest - response)


def judging(job: PlannedJob, gpu: Gpu, workload: Workload) -> float:
    """Returns the seconds of a step's questions to the judge. Each question is as long as its sample.

    The mean answer is assumed to be the same share of its limit as responses.
    """
    architecture, grid, settings = job.architectures["judge"], job.grids["judge"], job.config.judge
    num, answer = float(job.samples_per_replica("judge")), settings.sampling.max_response_tokens * MEAN_OF_LONGEST
    asked = Workload(prompt=workload.sample, response=answer, longest_response=answer)
    running = min(num, settings.max_running_requests)
    peak = gpu.flops(job.config.model.dtype) * grid.tp
    prefill = num * asked.prompt * _at_peak(architecture, gpu, asked.prompt / 2) / peak
    return prefill + num * answer / running * decode_step(job, gpu, asked, running, "judge")


def decode_step(job: PlannedJob, gpu: Gpu, workload: Workload, running: float, role: str = "rollout") -> float:
    """Returns the seconds of one token for each of `running` responses.

    They are the time of reading weights, keys and values or of the products, if that is longer. Tensor-parallel
    transfers are added.
    """
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
    """Returns the operations at peak that take as long as a token with attention to `context` positions."""
    experts = sum(architecture.sparse_layers) * expert_flops(architecture)
    others = forward_flops(architecture).of_token(context) - experts
    return others / gpu.efficiency.matmul + experts / gpu.efficiency.experts


def weights_read(architecture: Architecture, tp: int, running: float, ep: int = 1) -> float:
    """Returns the elements of a rank's weights read by a step with `running` tokens.

    Of the experts it reads the ones visited, if each token visits any of them with equal chance. Of the embedding it
    reads almost nothing.
    """
    held = served_elements(architecture, tp, ep)
    if not architecture.tied_embeddings:
        held -= architecture.vocab_size * architecture.hidden_size // tp
    moe = architecture.moe
    if moe is None:
        return held
    experts = 3 * moe.num_experts * moe.ffn_hidden_size * architecture.hidden_size * sum(architecture.sparse_layers)
    visited = 1 - (1 - moe.top_k / moe.num_experts) ** running
    return held - experts // tp * (1 - visited)
