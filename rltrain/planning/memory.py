"""Estimates the bytes on each kind of rank, its peak, and the task of the peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rltrain.config.models import VisionSettings
from rltrain.models import Architecture
from rltrain.planning.activation_memory import Activations
from rltrain.planning.hardware import GB, Gpu
from rltrain.planning.image_estimates import kept_feature_bytes, patches_at_once, store_bytes, with_images
from rltrain.planning.optimizer_memory import (
    gathered_bytes,
    held_elements,
    learned_elements,
    learns_adapters,
    optimizer_bytes,
    orthogonalizing_bytes,
    sharded_bytes,
    sharded_elements,
    trained_settings,
)
from rltrain.planning.planned import (
    Kind,
    PlannedJob,
    expert_data_parallel,
    in_buffers,
    layers_of_stage,
    trained_elements,
)
from rltrain.reshard.layout import MADE_BYTES
from rltrain.reshard.native import DELTA_BLOCK
from rltrain.rollout.layout import ARRIVING_BYTES
from rltrain.rollout.workspace import (
    PASS_TOKENS,
    SAMPLING_COPIES,
    WEIGHT_SYNC_BUFFERS,
    room_for_cache,
    workspace,
    workspace_beside_cache,
)
from rltrain.schedule.iterations import evaluated_step, fullest_step
from rltrain.schedule.memory_plan import MemoryPlan, Place, leaving_roles, ranks_left_by_engines
from rltrain.tasks.declaration import Key
from rltrain.tasks.roles import DECLARED, SYNCED, drawing_roles, model_tasks, served_roles, trained_roles

# Bytes on a rank: the parts of its roles, and the further needs of its running tasks.

MIB = 2**20
FP32 = 4
MEMORY_CHECKPOINTS = 4
"""Most checkpoints of a rank in its node's memory, with copies on the next node: two complete, two being written."""
POSITIONS_MULTIPLE = 8
"""Positions of the embedded engine's cache are a multiple of this."""
STAGING_SLOTS = 2
SGLANG_EXPERT_BYTES = 4
"""Bytes of an expert's number in SGLang's record of choices."""
SGLANG_MEMORY_FRACTION = 0.85
"""Share of the device for weights, keys and values if rollout.sglang.args has no mem_fraction_static. SGLang's own
choice depends on the device and is close to this."""
LOGPROB_CHUNK_ELEMENTS = 1 << 26
"""Most logits at a time on a GPU, and most logits that are kept for backward."""
FIELD_BYTES = 80
"""Bytes of a token's fields on the device, of its row, and of its log-prob with a gradient."""


def kv_bytes(architecture: Architecture, num_tokens: int, *, tp: int = 1, item_bytes: int = 2) -> int:
    """Returns the bytes of keys and values of `num_tokens` tokens on one rank of an engine of `tp` ranks.

    With more ranks than KV heads, each rank holds one. Latent attention keeps the latent and the rotated part of the
    key, whole on every rank.
    """
    if architecture.mla:
        elements = architecture.mla.kv_rank + architecture.mla.rope_head_dim
    else:
        elements = 2 * ceil(architecture.num_kv_heads / tp) * architecture.head_dim
    return num_tokens * architecture.num_attention_layers * elements * item_bytes


def state_bytes(architecture: Architecture, num_samples: int, *, tp: int = 1, item_bytes: int = 2) -> int:
    """Returns the bytes of gated delta net states of `num_samples` samples on one rank of an engine of `tp` ranks.

    States are float32. The earlier tokens needed by convolutions are included.
    """
    if architecture.delta is None:
        return 0
    own = architecture.delta.shared_by(tp)
    of_layer = own.num_heads * own.key_dim * own.value_dim * FP32 + own.channels * (own.kernel - 1) * item_bytes
    return num_samples * own.num_layers * of_layer


def resident_bytes(job: PlannedJob, role: str, stage: int) -> dict[str, int]:
    """Returns the bytes of each part of a role's memory, on a rank of one of its pipeline stages.

    Keys and values are for all responses running at once. `cache_on_gpu` returns the room for them on a device.
    """
    if job.runs_elsewhere(role):
        return {"weights": 0, "kv_cache": 0}
    if role in drawing_roles():
        cache = _cache(job, role, _running(job, role) * _positions(job, role), _running(job, role))
        weights, base = job.served_bytes_of(role), 0
        if job.config.keeps_adapters_apart(role):
            weights, base = job.adapter_bytes_of(role), weights
        return {"weights": weights, "base": base, "kv_cache": cache}
    architecture, grid, item = job.architectures[role], job.grids[role], job.item_bytes
    if role == "judge":
        tokens = _judged_at_once(job) * job.config.judge.max_context_tokens
        cache = kv_bytes(architecture, tokens, tp=grid.tp, item_bytes=item)
        cache += state_bytes(architecture, _judged_at_once(job), tp=grid.tp, item_bytes=item)
        return {"weights": job.served_bytes_of(role), "kv_cache": cache}
    if role in job.sharing:
        return {}
    if grid.is_sharded:
        return sharded_bytes(job, role)
    elements = trained_elements(architecture, grid, stage)
    if DECLARED[role].model == "evaluated":
        models = len(job.config.teacher.checkpoints) if role == "teacher" else 1
        return {"weights": models * elements.total * item}
    replicas, expert_replicas = grid.dp * grid.cp, expert_data_parallel(grid)
    learned, optimizer = learned_elements(job, role, stage), optimizer_bytes(job, role, stage)
    frozen = elements.total - (0 if learns_adapters(job, role) else learned.total)
    held = learned.total
    if trained_settings(job, role).distributed_optimizer and replicas > 1:
        held = in_buffers(learned.dense, replicas) + in_buffers(learned.experts, expert_replicas)
    return {
        "weights": (frozen + held) * item,
        "master_weights": optimizer.on_device(optimizer.masters),
        "optimizer": optimizer.on_device(optimizer.states),
        "gradients": held * FP32,
    }


def cache_on_gpu(job: PlannedJob, role: str, gpu: Gpu, beside: int) -> int:
    """Returns the bytes of keys and values on a rank of an engine of the policy. `beside` bytes are already in use.

    The result suffices for all responses running at once, unless the engine's limit is lower. It has room for at least
    one context.
    """
    rollout = job.config.served(role)
    if job.runs_elsewhere(role):
        return 0
    memory = gpu.memory_gb * GB
    if rollout.engine == "sglang":
        fraction = float(rollout.sglang.args.get("mem_fraction_static", SGLANG_MEMORY_FRACTION))
        room = memory * fraction - job.served_bytes_of(role)
    elif isinstance(rollout.kv_cache_gb, str):
        needed = workspace_beside_cache(job.config, job.architectures[role], job.grids[role], role)
        room = room_for_cache(memory - beside, memory, needed)
    else:
        room = rollout.kv_cache_gb * GB
    running = rollout.max_running_requests
    wanted = _cache(job, role, running * _positions(job, role), running)
    return max(_cache(job, role, _positions(job, role), 1), min(wanted, int(room)))


def _cache(job: PlannedJob, role: str, num_tokens: int, num_samples: int) -> int:
    """Returns the bytes of a cache, with the experts recorded by the embedded engine and the states of samples."""
    architecture = job.architectures[role]
    records = role == "rollout" and job.shape.replays_rollout and job.config.rollout.engine == "embedded"
    recorded = architecture.routing_bytes if records else 0
    states = state_bytes(architecture, num_samples, tp=job.grids[role].tp, item_bytes=job.item_bytes)
    return _kv_bytes(job, role, num_tokens) + num_tokens * recorded + states


def _kv_bytes(job: PlannedJob, role: str, num_tokens: int) -> int:
    return kv_bytes(job.architectures[role], num_tokens, tp=job.grids[role].tp, item_bytes=job.item_bytes)


def _recorded_by_server(job: PlannedJob, kv_cache: int) -> int:
    """Returns the bytes of the recorded experts of all tokens in `kv_cache` bytes, on each rank of a server. They are
    int32 and include layers without experts."""
    architecture = job.architectures["rollout"]
    assert architecture.moe is not None
    token_bytes = architecture.num_layers * architecture.moe.top_k * SGLANG_EXPERT_BYTES
    return kv_cache // _kv_bytes(job, "rollout", 1) * token_bytes


def _running(job: PlannedJob, role: str) -> int:
    """Returns the number of responses running at once."""
    running, evaluates = (
        job.config.served(role).max_running_requests,
        role == "evaluation" or not job.config.evaluates_apart,
    )
    is_evaluating = job.config.evaluations and evaluates
    return running if is_evaluating else min(running, job.samples_per_replica(role))


def _judged_at_once(job: PlannedJob) -> int:
    return min(job.config.judge.max_running_requests, job.samples_per_replica("judge"))


def _positions(job: PlannedJob, role: str) -> int:
    """Returns the positions of the longest context."""
    return -(-job.config.served(role).max_context_tokens // POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE


def working_bytes(job: PlannedJob, task: str, stages: Mapping[str, int]) -> dict[str, int]:
    """Returns the further bytes of a rank during a task, in addition to its roles' parts, by purpose.

    `stages` are the rank's pipeline stages in its roles with something on the device.
    """
    if task in SYNCED:
        return _sync_bytes(job, task, stages)
    if task in ("generate", "generate_evaluation"):
        return _generating_bytes(job, "rollout")
    if task == "run_evaluation":
        part = min(ARRIVING_BYTES, job.served_bytes_of("evaluation"))  # of weights that arrive during the task
        return {**_generating_bytes(job, "evaluation"), **_sync_bytes(job, task, stages), "arriving": part}
    if task in ("verdicts", "evaluation_verdicts"):
        logits = 0 if job.runs_elsewhere("judge") else _judged_at_once(job) * job.architectures["judge"].vocab_size
        return {"logits": logits * FP32 * SAMPLING_COPIES, **_staging(job, "judge")}
    role, trains = model_tasks().get(task, (None, False))
    if role is None:
        return {}
    activations = Activations(job, role, stages[role])
    tokens = job.micro_batch_rows(role)
    found = {
        "activations": activations.training(tokens) if trains else activations.evaluating(tokens),
        "fields": _unshared_bytes(job, role, tokens),
    }
    if role in _replaying(job):
        found["routed experts"] = _replayed_bytes(job, role, stages[role]) * tokens
    if activations.has_head:
        found["logits"] = _logit_bytes(job, role, tokens, trains)
    if task.startswith("update") and (needed := orthogonalizing_bytes(job, role)):
        found["orthogonalizing"] = needed
    if job.grids[role].is_sharded:
        found["gathered weights"] = gathered_bytes(job, role, trains=trains)
    return with_images(job, role, stages[role], found, trains=trains)


def _unshared_bytes(job: PlannedJob, role: str, tokens: int) -> int:
    """Returns the bytes of the tokens that are computed with another sample's, in a micro-batch that computes `tokens`.
    They have their own fields and log-probs."""
    share = job.computed_of_longest(role).share
    return int(tokens * (1 / share - 1)) * FIELD_BYTES


def _replaying(job: PlannedJob) -> tuple[str, ...]:
    """Returns the roles whose routers replay or record choices."""
    return {"off": (), "rollout": ("actor", "inference"), "recompute": ("actor",)}[job.config.model.router_replay]


def _replayed_bytes(job: PlannedJob, role: str, stage: int) -> int:
    """Returns the bytes of replayed choices per token, in the layers of a stage, for all micro-batches under way."""
    architecture, grid = job.architectures[role], job.grids[role]
    layers = layers_of_stage(architecture, grid, stage)
    of_layer = architecture.routing_bytes // max(1, sum(architecture.sparse_layers))
    is_cut = grid.tp if architecture.is_split_by_tokens else 1
    return sum(layers) * of_layer * grid.pp // is_cut


def _sync_bytes(job: PlannedJob, task: str, stages: Mapping[str, int]) -> dict[str, int]:
    found = {"buckets": WEIGHT_SYNC_BUFFERS * job.config.weight_sync.bucket_mb * MIB, **_merged(job, task, stages)}
    for role in drawing_roles():
        found |= _staging(job, role) if role in stages else {}
    return found


def _merged(job: PlannedJob, task: str, stages: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of weights made for a sync: merged with adapters, rounded, or from the host, a few layers at a
    time."""
    apart = task == "weight_sync" and job.config.keeps_adapters_apart("rollout")
    for_engines = SYNCED.get(task, "evaluation") in drawing_roles()
    makes = job.config.makes_served_weights if for_engines else job.config.makes_actor_weights
    if not makes or "actor" not in stages or apart:
        return {}
    weights = resident_bytes(job, "actor", stages["actor"])["weights"]
    if job.config.keeps_shards_on_host("actor"):
        weights = held_elements(job.architectures["actor"], job.grids["actor"]) * FP32
    layers = len(layers_of_stage(job.architectures["actor"], job.grids["actor"], stages["actor"]))
    return {"merged": min(weights, max(MADE_BYTES, weights // max(layers, 1)))}


def _staging(job: PlannedJob, role: str) -> dict[str, int]:
    """Returns the bytes of staging memory of weights on their way to a server."""
    served = job.config.served(role)
    if served.engine == "embedded":
        return {}
    slots = 1 if served.engine == "http" and served.http.weights == "folder" else STAGING_SLOTS
    return {"staging": slots * job.in_transfer_bytes_of(role)}


def _generating_bytes(job: PlannedJob, role: str) -> dict[str, int]:
    """Returns the bytes of logits of the running responses, and of the prompts' hidden states during prefill."""
    if job.runs_elsewhere(role):
        return {}
    architecture, grid, served = job.architectures[role], job.grids[role], job.config.served(role)
    running, samples_per_prompt = served.max_running_requests, job.shape.samples_per_group
    if role == "evaluation":
        samples_per_prompt = min(plan.samples_per_prompt for plan in job.config.evaluations)
    else:
        running = min(running, job.samples_per_replica(role))
    prompts = min(-(-running // samples_per_prompt), running)
    prompt = job.config.data.max_prompt_tokens
    at_once = PASS_TOKENS if served.engine == "sglang" else max(PASS_TOKENS, prompt)
    needed = workspace(
        architecture,
        grid,
        num_running=running,
        prefill_tokens=min(prompts * prompt, at_once),
        item_bytes=job.item_bytes,
        residual_bytes=job.residual_bytes,
        fp8=served.dtype == "fp8" and served.engine == "embedded",
        vision=_vision_of_engine(job) if served.engine == "embedded" else None,
    )
    return {"logits": needed.logits, "activations": needed.activations}


def _vision_of_engine(job: PlannedJob) -> VisionSettings | None:
    """Returns the settings of images with room for the largest."""
    settings = job.config.model.vision
    if settings is None:
        return None
    return settings.model_copy(update={"max_patches": patches_at_once(job, settings)})


def _logit_bytes(job: PlannedJob, role: str, tokens: int, trains: bool) -> int:
    """Returns the bytes of a tile of logits, and in training of the tile that is kept for backward.

    Kernels read a tile and put the gradient in its place. In training the bytes include the fp32 gradient of the hidden
    states. The tensor that stands in for the gradient of the weights follows the tiles.
    """
    architecture, grid = job.architectures[role], job.grids[role]
    if architecture.head == "value":
        return tokens * FP32 * (1 + trains)
    columns = -(-architecture.vocab_size // grid.tp)
    tile = min(tokens * columns, LOGPROB_CHUNK_ELEMENTS)
    if not trains:
        return tile * job.logit_bytes
    # Sums of gradients have their own place. After the tiles an empty tensor stands in for the gradient of the weights.
    is_tied = architecture.tied_embeddings and grid.pp == 1
    has_none = grid.is_sharded or learns_adapters(job, role) or is_tied
    stand_in = 0 if has_none else columns * architecture.hidden_size * job.item_bytes
    return max(2 * tile * job.logit_bytes, stand_in) + tokens * architecture.hidden_size * FP32


def recomputed_logits(job: PlannedJob, role: str) -> float:
    """Returns the share of a micro-batch's logits that backward computes again."""
    columns = -(-job.architectures[role].vocab_size // job.grids[role].tp)
    return max(0.0, 1 - LOGPROB_CHUNK_ELEMENTS / (job.micro_batch_rows(role) * columns))


def host_bytes(job: PlannedJob, stages: Mapping[str, int], leaving: frozenset[Key]) -> dict[str, int]:
    """Returns the bytes of host memory kept by a rank, by purpose. It is pinned unless the name says otherwise.

    It holds copies of the `leaving` parts and the weights of guests. It also holds optimizer states and activations
    kept on the host, the source of a checkpoint, and the rank's share of the copy of SGLang's weights on its node.
    """
    parts = {
        (role, part): size for role, stage in stages.items() for part, size in resident_bytes(job, role, stage).items()
    }
    in_servers = {role for role in served_roles() if job.config.served(role).engine == "sglang"}
    found = {"offloaded": sum(parts.get(key, 0) for key in leaving if key[0] not in in_servers)}
    found["offloaded"] += sum(
        parts[role, "weights"] // _equal_on_node(job, role) for role in stages if role in job.guests
    )
    trained = [role for role in trained_roles() if role in stages]
    found["optimizer"] = sum(optimizer_bytes(job, role, stages[role]).on_host for role in trained)
    at_once = [Activations(job, role, stages[role]).offloaded(job.micro_batch_rows(role)) for role in trained]
    found["activations"] = max(at_once, default=0)
    saved = sum(_saved_bytes(job, role, stages[role]) for role in trained)
    if job.config.checkpoint.saves or job.config.checkpoint.memory:
        found["checkpoint"] = saved
    if job.config.checkpoint.memory:
        nodes = {rank // job.ranks_per_node for rank in job.placement.hosting}
        found["checkpoints in memory, not pinned"] = MEMORY_CHECKPOINTS * saved * min(len(nodes), 2)
    kept = [role for role in in_servers & stages.keys() if job.config.served(role).sglang.keep_weights]
    if replaying := [role for role in _replaying(job) if role in stages]:
        found["routed experts, not pinned"] = sum(
            job.samples_per_replica(role) * job.longest_tokens * job.architectures[role].routing_bytes
            for role in replaying
        )
    if "rollout" in in_servers & stages.keys() and job.shape.replays_rollout and job.architectures["rollout"].moe:
        found["server's routed experts"] = _recorded_by_server(job, parts["rollout", "kv_cache"])
    found["engine"] = sum(
        (parts[role, "weights"] + parts.get((role, "base"), 0)) // _equal_on_node(job, role) for role in kept
    )
    found["images, not pinned"] = store_bytes(job, tuple(stages))
    found["image features, not pinned"] = kept_feature_bytes(job, stages)
    if "evaluation" in stages:
        waiting = 1 + job.config.evaluation.max_waiting
        found["evaluations, not pinned"] = waiting * parts["evaluation", "weights"]
    return {name: size for name, size in found.items() if size}


def memory_checkpoint_bytes(job: PlannedJob, node: int) -> int:
    """Returns the least bytes of one checkpoint in the memory of a node: its ranks' own data, and a copy of the
    previous node's.

    Returns 0 if the node saves nothing.
    """
    of_nodes: dict[int, int] = {}
    for kind, ranks in job.kinds.items():
        saved = sum(_saved_bytes(job, role, stage) for role, stage in kind.stages if role in trained_roles())
        for rank in ranks:
            of_nodes[rank // job.ranks_per_node] = of_nodes.get(rank // job.ranks_per_node, 0) + saved
    nodes = sorted(of_nodes)
    if node not in nodes:
        return 0
    before = nodes[nodes.index(node) - 1]
    return of_nodes[node] + (of_nodes[before] if before != node else 0)


def _saved_bytes(job: PlannedJob, role: str, stage: int) -> int:
    """Returns the bytes of moments and master weights that a rank saves. Only one rank saves each element, if the
    optimizer is sharded. Otherwise replicas divide the work."""
    grid = job.grids[role]
    alone = trained_settings(job, role).distributed_optimizer or grid.is_sharded
    shares = 1 if alone else grid.dp * grid.cp
    return (optimizer_bytes(job, role, stage).states + sharded_elements(job, role, stage) * FP32) // shares


def _equal_on_node(job: PlannedJob, role: str) -> int:
    """Returns the ranks of a node with equal weights of a role. They keep one copy."""
    grid = job.grids[role]
    return min(grid.dp * grid.cp, max(1, job.ranks_per_node // grid.tp))


# Bytes of a weight sync of changes only, relative to a full one, and bytes of the files for servers at URLs.

CHANGED_SHARE = 0.03
"""Share of 16-bit elements changed by a step. Publications report 1 to 3%. Wider elements all change."""


def keeping(job: PlannedJob) -> str | None:
    """Returns the place of the last sent or written weights: "device" or "host". None if syncs send everything."""
    delta = job.config.weight_sync.delta
    return delta.keep_on if delta and {"actor", "rollout"} <= job.grids.keys() else None


def kept_bytes(job: PlannedJob, rank: int) -> int:
    """Returns about how many bytes `rank` sends in a full sync. With weight_sync.delta it keeps them.

    Ranks of the actor send what each node lacks, in even shares. Engines pass weights on within their node. Nothing is
    subtracted for ranks with both roles. For files the rollout's ranks keep the bytes that they write.
    """
    if keeping(job) is None:
        return 0
    actor, rollout = job.grids["actor"].ranks, job.grids["rollout"].ranks
    held = job.served_bytes_of("rollout")
    if job.config.synced_delta is None:
        return held // len(rollout) if rank in rollout else 0
    num_nodes = len({engine // job.ranks_per_node for engine in rollout})
    of_node = held * len(rollout) // num_nodes
    entering = min(of_node, held * job.grids["rollout"].tp)
    sent = entering * num_nodes // len(actor) if rank in actor else 0
    return sent + ((of_node - entering) * num_nodes // len(rollout) if rank in rollout else 0)


def sent_share(job: PlannedJob) -> float:
    """Returns the mean bytes of a sync relative to a full one. Engines that have left their GPU get everything."""
    if job.config.synced_delta is None or ranks_left_by_engines(job.config, job.placement):
        return 1.0
    return changed_share(job)


def changed_share(job: PlannedJob) -> float:
    """Returns the mean bytes of changes relative to all weights, over `full_every` syncs.

    A changed element takes one further byte for its position. A block of elements takes one for their number.
    """
    delta = job.config.weight_sync.delta
    assert delta is not None, "weight_sync.delta is set"
    item = job.item_bytes
    changed = CHANGED_SHARE if item <= 2 else 1.0
    share = min(1.0, (changed * (item + 1) + 1 / DELTA_BLOCK) / item)
    return (1 + (delta.full_every - 1) * share) / delta.full_every


# The peak of every kind of rank, the task of the peak, and whether it fits.

COMMUNICATORS, CONTEXT, SENT_LAST = "communicators", "context", "sent last"


@dataclass(frozen=True)
class TaskMemory:
    """Bytes on the device during a task: parts by "role.part", and the further needs of the task."""

    task: str
    bytes_of: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes_of.values())


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks of one kind."""

    kind: Kind
    ranks: tuple[int, ...]
    parts: Mapping[Key, int]
    tasks: Sequence[TaskMemory]
    host: Mapping[str, int]

    @property
    def peak(self) -> TaskMemory:
        """The task with the most bytes, the first of several."""
        return max(self.tasks, key=lambda task: task.total)

    def fits(self, gpu: Gpu) -> bool:
        return self.peak.total <= gpu.usable_bytes


def rank_memories(job: PlannedJob, gpu: Gpu) -> list[RankMemory]:
    """Returns the memory of each kind of rank with something on the device, in the order of their first ranks."""
    kinds = [(kind, ranks) for kind, ranks in job.kinds.items() if kind.stages]
    return [_memory(job, gpu, kind, ranks, _fixed_bytes(job, gpu, ranks[0])) for kind, ranks in kinds]


def cache_bytes(memories: Sequence[RankMemory], role: str = "rollout") -> int:
    """Returns the bytes of keys and values on the engine rank with the least room for them. 0 without engines."""
    cache = (role, "kv_cache")
    return min((memory.parts[cache] for memory in memories if cache in memory.parts), default=0)


def largest(memories: Sequence[RankMemory]) -> RankMemory:
    """Returns the kind of rank with the highest peak."""
    return max(memories, key=lambda memory: memory.peak.total)


def _memory(job: PlannedJob, gpu: Gpu, kind: Kind, ranks: tuple[int, ...], fixed: Mapping[str, int]) -> RankMemory:
    stages = dict(kind.stages)
    held = {role: resident_bytes(job, role, stage) for role, stage in kind.stages}
    parts = {(role, part): size for role, of_role in held.items() for part, size in of_role.items()}
    step = _of_a_step(job, kind)
    for role in (role for role in drawing_roles() if role in stages):
        cache, draws = (role, "kv_cache"), "run_evaluation" if role == "evaluation" else "generate"
        beside = [_on_device(parts, places) - parts[cache] for task, places in step if task == draws]
        taken = max(beside, default=parts[role, "weights"]) + sum(fixed.values())
        parts[cache] = cache_on_gpu(job, role, gpu, taken)
    rows, on_host = [], set[Key]()
    for task, places in step:
        on_host |= {key for key, place in places.items() if place == "host" and key[0] not in job.guests}
        there = {".".join(key): parts[key] for key, place in places.items() if place == "device" and key in parts}
        rows.append(TaskMemory(task, {**there, **working_bytes(job, task, stages), **fixed}))
    rows = rows or [TaskMemory("start", {**{".".join(key): size for key, size in parts.items()}, **fixed})]
    host = host_bytes(job, stages, frozenset(on_host))
    if keeping(job) == "host":
        host[SENT_LAST] = kept_bytes(job, ranks[0])
    return RankMemory(kind, ranks, parts, rows, host)


def _on_device(parts: Mapping[Key, int], places: Mapping[Key, Place]) -> int:
    return sum(parts.get(key, 0) for key, place in places.items() if place == "device")


def places_along(job: PlannedJob, kind: Kind) -> list[tuple[int, dict[Key, Place]]]:
    """Returns (position, place of each part) along the steady order, for a rank of a kind."""
    hosted = kind.device_roles
    guests = [role for role in job.guests if role in hosted]
    sharing = [role for role in job.sharing if role in hosted]
    offload = {role: getattr(job.config, role).offload for role in hosted}
    leaving = leaving_roles(offload, [*guests, *sharing])
    overlays = {(role, "weights"): ("actor", "weights") for role in guests}
    return [*MemoryPlan(job.order, hosted, guests, sharing).places(leaving, overlays)]


def _of_a_step(job: PlannedJob, kind: Kind) -> list[tuple[str, dict[Key, Place]]]:
    """Returns (task, place of each part) of the fullest step. Repetitions are left out."""
    beside_steps = any(DECLARED[role].beside_steps for role in kind.roles)
    step = evaluated_step(job.order) if beside_steps else fullest_step(job.order)
    found: list[tuple[str, dict[Key, Place]]] = []
    for position, places in places_along(job, kind):
        entry = job.order[position]
        if entry.step == step and (entry.name, places) not in found:
            found.append((entry.name, places))
    return found


def _fixed_bytes(job: PlannedJob, gpu: Gpu, rank: int) -> dict[str, int]:
    """Returns the bytes of communicators, of the driver's contexts (one more per SGLang server), and of the last sent
    weights."""
    efficiency = gpu.efficiency
    served = [job.config.served(role) for role in served_roles() if role in job.placement.hosts(rank)]
    num_servers = sum(settings.engine == "sglang" for settings in served)
    return {
        COMMUNICATORS: int(job.num_communicators[rank] * efficiency.communicator_mb * MIB),
        CONTEXT: int((1 + num_servers) * efficiency.context_mb * MIB),
        **({SENT_LAST: kept_bytes(job, rank)} if keeping(job) == "device" else {}),
    }
