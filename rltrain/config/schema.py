"""Every key of a config file, with type, default and meaning. Objects are frozen, and unknown keys are refused."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rltrain.config.data import Curriculum as Curriculum
from rltrain.config.data import Data as Data
from rltrain.config.data import Images as Images
from rltrain.config.data import PromptFile as PromptFile
from rltrain.config.data import PromptSource as PromptSource
from rltrain.config.data import SolvedRate as SolvedRate
from rltrain.config.evaluation import Evaluation as Evaluation
from rltrain.config.evaluation import EvaluationPlan as EvaluationPlan
from rltrain.config.evaluation import EvaluationSampling as EvaluationSampling
from rltrain.config.evaluation import EvaluationSet as EvaluationSet
from rltrain.config.evaluation import KeepBest as KeepBest
from rltrain.config.evaluation import evaluation_plans, of_own_engines
from rltrain.config.learning import Advantages as Advantages
from rltrain.config.learning import Batch as Batch
from rltrain.config.learning import ClipCov as ClipCov
from rltrain.config.learning import Correction as Correction
from rltrain.config.learning import CorrectionLevel as CorrectionLevel
from rltrain.config.learning import Dppo as Dppo
from rltrain.config.learning import DynamicSampling as DynamicSampling
from rltrain.config.learning import Kl as Kl
from rltrain.config.learning import KlCov as KlCov
from rltrain.config.learning import Loss as Loss
from rltrain.config.learning import OnDivergence as OnDivergence
from rltrain.config.learning import OverlongPenalty as OverlongPenalty
from rltrain.config.learning import PolicyLoss as PolicyLoss
from rltrain.config.learning import RatioMask as RatioMask
from rltrain.config.learning import Sapo as Sapo
from rltrain.config.models import OF_POLICY, Lora
from rltrain.config.models import Actor as Actor
from rltrain.config.models import Backend as Backend
from rltrain.config.models import Critic as Critic
from rltrain.config.models import FakeQuantization as FakeQuantization
from rltrain.config.models import Fsdp as Fsdp
from rltrain.config.models import Inference as Inference
from rltrain.config.models import LossScale as LossScale
from rltrain.config.models import Model as Model
from rltrain.config.models import MoE as MoE
from rltrain.config.models import Mtp as Mtp
from rltrain.config.models import Offload as Offload
from rltrain.config.models import Optimizer as Optimizer
from rltrain.config.models import Parallel as Parallel
from rltrain.config.models import Recompute as Recompute
from rltrain.config.models import Reference as Reference
from rltrain.config.models import RewardModel as RewardModel
from rltrain.config.models import SharePrefixes as SharePrefixes
from rltrain.config.models import Teacher as Teacher
from rltrain.config.models import Trained as Trained
from rltrain.config.models import VisionSettings as VisionSettings
from rltrain.config.rewards import Judge as Judge
from rltrain.config.rewards import Reward as Reward
from rltrain.config.rewards import RewardPart as RewardPart
from rltrain.config.rollout import Env
from rltrain.config.rollout import Rollout as Rollout
from rltrain.config.rollout import Sampling as Sampling
from rltrain.config.rollout import Served as Served
from rltrain.config.rollout import SGLang as SGLang
from rltrain.config.section import Count, NonNegative, NonNegativeInt, Positive, Section, Words, split_roles
from rltrain.tasks.roles import rewarding_roles

# Checks during a run.


class Checks(Section):
    """Comparisons of trainer and engine, and of replicas.

    After every step trainer and engine are compared on response tokens from the weights at the start of the step.
    Tokens from older weights differ for good reasons and are left out. Replicas of trained models can be compared with
    each other and with the engines.
    """

    max_logprob_diff: Positive | None = None
    """Limit of train/fresh_logprob_abs_diff, the mean absolute difference of log-probs. `null`: no limit."""
    max_kl: Positive | None = None
    """Limit of train/fresh_kl, the KL of the trainer from the engine. `null`: no limit."""
    action: Literal["stop", "pause", "warn"] = "stop"
    """Reaction to an exceeded limit. `stop`: the run ends, and no checkpoint is saved of weights trained on such
    tokens. `pause`: the run saves at the end of the step and ends with an error. A new start resumes from there.
    `warn`: the run continues with a warning."""
    replicas: NonNegativeInt = 0
    """Steps between comparisons of replicas. Ranks with the same part of the actor or the critic compare checksums of
    their weights. The run ends with rank and parameter of a difference. Such differences come from faulty processors or
    memory. The engines' weights are compared in these steps too, as with weight_sync.verify. `0`: never."""


# Learning from pairs.


class Preference(Section):
    """Settings of algorithms that learn from pairs: dpo and reward_model."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """dpo: sigmoid is the loss of DPO. ipo is the squared distance from 1 / (2 beta)."""
    beta: Positive = 0.1
    """dpo: strength of the reference. Larger values keep the actor nearer to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo with loss sigmoid: assumed share of pairs with swapped responses."""
    sft_coef: NonNegative = 0.0
    """dpo: weight of the chosen responses' negative log-prob per token, added to the loss."""
    center_coef: NonNegative = 0.0
    """reward_model: weight of the squared sum of a pair's scores. It keeps scores near 0."""


# Syncs of changed weights.


class WeightDelta(Section):
    """Sends only changed weights in a weight sync, with bit-for-bit the same result. With rollout.engine http the
    rollout's ranks receive everything and write the changes to rollout.http.weights_dir. launch/serve.py and SGLang
    with rltrain's plugin read them."""

    full_every: Count = 50
    """Number of syncs from one full sync to the next. The first sync of a job is full too, and so is any sync with an
    engine without the last weights. So are some syncs after one that saved nothing, because nearly everything had
    changed. Full files are also written once the files of changes have as many bytes."""
    check_every: NonNegativeInt = 0
    """Number of delta syncs from one checksum comparison to the next, as with weight_sync.verify. After a difference
    everything is sent at once, and all later syncs are compared. `0`: only the first of a job. Files are not affected,
    as their readers always check them."""
    keep_on: Literal["device", "host"] = "device"
    """Place of a rank's copy of its last sent or written weights. The copy is as large as a full sync."""
    in_shared_memory: bool = False
    """Also sends only changes through memory shared by ranks of a node on CPUs. A full copy is as fast, so this is for
    measurements and tests."""


# Checkpoints and logs.


class MemoryCheckpoints(Section):
    """Checkpoints of the whole run in the memory of the nodes. Each node also keeps a copy of its neighbour's."""

    interval: Count = 1
    """Steps between checkpoints."""
    folder: str = "/dev/shm"
    """A local folder of every node in memory (a tmpfs). $NAME is replaced by an environment variable of the node. It
    holds up to four checkpoints, each with the files of the node and of its neighbour. A job is refused if a node has
    no room for three."""


class Checkpoint(Section):
    """Checkpoints of the run, and exports of the actor."""

    save_hf: bool = True
    """Writes the trained actor in Hugging Face format to <output_dir>/hf at the end."""
    save_hf_interval: NonNegativeInt = 0
    """Steps between further exports of the actor to <output_dir>/hf_steps/step_<number>. `0`: none."""
    save_interval: NonNegativeInt = 0
    """Steps between checkpoints of the whole run. A resumed run continues as if it had never stopped. One more is saved
    after the last step. `0`: none by steps."""
    save_every_s: NonNegative | None = 600.0
    """Seconds between checkpoints of the whole run, in addition to those of save_interval. They are saved at the end of
    a step. A run that has saved one also saves after its last step. `0` or `null`: none by time. With either key set,
    SIGTERM, SIGUSR1 and Ctrl-C also save one."""
    dir: str | None = None
    """A folder visible to all nodes. `null`: <output_dir>/checkpoints."""
    keep: NonNegativeInt = 2
    """Number of newest checkpoints to keep. `0`: all."""
    resume: Annotated[str, Words("auto, none, or the folder of a checkpoint")] = "auto"
    """`auto`: resumes from the newest intact checkpoint in checkpoint.dir, or starts from the beginning without one.
    `none`: starts from the beginning. A folder: resumes from this checkpoint and moves later ones in checkpoint.dir out
    of the way. A job restarted by torchrun resumes from its own checkpoints."""
    asynchronous: bool = True
    """Writes checkpoints during training, from a copy on the host. `false`: training waits until all files are
    durable."""
    stop_within_s: Positive = 300.0
    """Seconds to save after SIGTERM or SIGUSR1. The job saves at the end of its step and ends. If that takes longer, it
    ends without saving."""
    memory: MemoryCheckpoints | None = None
    """Checkpoints in the nodes' memory too, such as {interval: 1}. A job restarted by torchrun or by hand resumes from
    the newest one, unless two neighbouring nodes were lost. They are removed at the end of the run."""

    @property
    def saves(self) -> bool:
        """Returns whether checkpoints of the whole run go to disk, by steps or by time."""
        return bool(self.save_interval or self.save_every_s)


class Wandb(Section):
    """Logging to Weights & Biases."""

    project: str | None = None
    """Project in Weights & Biases. `null`: no logging there."""
    name: str | None = None
    """Name of the run. `null`: chosen by Weights & Biases."""
    mode: Literal["online", "offline"] | None = None
    """`null`: online with a key, offline without."""


class Logging(Section):
    """Records of the run in addition to metrics.jsonl."""

    progress: bool = True
    """Prints the progress of the run."""
    trace: bool = False
    """Writes every rank's tasks, transfers and memory moves to <output_dir>/trace/, for Perfetto and
    tools/report.py."""
    samples: NonNegativeInt = 4
    """Number of responses per step in <output_dir>/samples.jsonl, with prompt and reward. `rendered_prompt` is the text
    shown to the model, if a chat template, tokenizer or environment changed the prompt."""
    sample_ids: bool = False
    """Writes the ids of all trained samples of each step to <output_dir>/sample_ids/."""
    tensorboard: bool = False
    """Writes all metrics to <output_dir>/tensorboard. It needs the package tensorboard."""
    wandb: Wandb = Wandb()


class WeightSync(Section):
    """The transfer of the actor's weights to engines and other models."""

    bucket_mb: Count = 32
    """Mebibytes packed and received by a rank at a time, with two of each in flight. Ranks with access to each other's
    memory, as on CPUs, use at most 4."""
    transport: Literal["planned", "full_gather"] = "planned"
    """`full_gather` assembles every tensor in full on every rank. It is slow and serves to check the result of
    planned."""
    verify: bool = False
    """Compares checksums of both sides after every sync, reading all weights once. The job ends if a tensor differs. An
    SGLang server also checks its copy, and is replaced if it differs."""
    delta: WeightDelta | None = None
    """Sends only changed weights. `null`: every sync sends everything."""
    adapters: Literal["merged", "apart"] = "merged"
    """With model.lora. `merged`: engines receive weights with merged adapters. `apart`: the rollout's engines keep base
    and adapters separately. Only the first sync sends the base. Every sync sends the adapters. Servers at URLs must be
    of SGLang or vLLM then, and started with adapters enabled."""


class Schedule(Section):
    """Overlap of the tasks of different steps and roles. The placement decides which modes are possible."""

    mode: Literal["sequential", "pipelined", "asynchronous"] = "sequential"
    """`sequential`: one step after the other. `pipelined`: finished prompt groups are processed while others are still
    generated. `asynchronous`: the rollout is up to max_staleness steps ahead of training."""
    chunks: Count | None = None
    """Number of parts of a step. Each part travels on its own, in the order of finished prompt groups. `null`: 4 if
    pipelined, else 1."""
    max_staleness: NonNegativeInt = 0
    """Largest allowed staleness of a token in training, the training step minus its policy version."""
    on_stale: Literal["drop", "mask", "correct"] = "drop"
    """Treatment of samples with tokens over the limit. `drop`: the samples are left out. `mask`: these tokens are left
    out. `correct`: the samples are trained on, weighted by loss.correction. They are counted in each case."""
    partial_rollouts: bool = False
    """A generate task ends when enough prompt groups are done. Unfinished groups continue in the next task."""
    oversampling: Positive = 0.25
    """With partial_rollouts: further prompt groups in flight, as a fraction of a step's groups."""
    sync_every: Count = 1
    """Steps from one weight sync to the next. max_staleness has to be at least sync_every - 1."""
    in_flight_sync: bool = True
    """With mode asynchronous: engines take new weights between two decode steps. `false`: between two generate
    tasks."""


class Residency(Section):
    """Use of the device by roles with common ranks. They use it in turn."""

    communicators: Literal["keep", "release"] = "keep"
    """`release` destroys the communicators of a role when all its ranks have left the device. They are created again
    when it returns."""
    prefetch: bool = True
    """Brings the next role's memory back before the present task ends, if there is room."""
    allocator: Literal["auto", "torch", "torch_memory_saver"] = "auto"
    """Memory that leaves a GPU. `torch` returns it elsewhere. `auto` keeps the addresses of embedded engines' weights
    and KV caches, if the driver can. `torch_memory_saver`, if installed, keeps all addresses."""


class Timeouts(Section):
    """Limits of waits for other ranks. They run only while no rank of the job makes progress."""

    no_progress_s: Positive = 1800.0
    """Seconds without progress of any rank before the job ends with the rank at fault, its role, task and step. Choose
    more than the longest work without progress: a micro-batch, a decode step, a reward, a checkpoint file or a first
    compilation."""
    lost_s: Positive = 300.0
    """Seconds without a sign of life from a rank before its host counts as lost and the job ends, even if other ranks
    make progress. A rank without an answer from the job's store for as long ends too. Choose more than the longest call
    holding Python's interpreter lock."""
    tasks: dict[str, float] = Field(default_factory=dict)
    """Separate limits for tasks by name, such as {generate: 7200}."""


class Config(Section):
    """The config of a job.

    If role env is placed, role reward is placed on the rollout's ranks by default. The reward then comes from the
    environments, unless the config names a reward function. If instead a model scores the responses and no function is
    named, its score is the reward.
    """

    algorithm: Literal[
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "maxrl",
        "pass_at_k",
        "gdpo",
        "gpg",
        "optimal_token_baseline",
        "ppo",
        "own",
        "distillation",
        "sft",
        "dpo",
        "reward_model",
        "evaluate",
    ] = "grpo"
    """`own`: advantages come from advantages.function. `evaluate`: evaluates model.path without training
    (launch/evaluate.py)."""
    steps: Count
    """Number of training steps."""
    seed: NonNegativeInt = 0
    """Seed of all random numbers: new weights, the order of prompts, and sampling."""
    output_dir: str = "runs/default"
    """Folder for everything written by the run."""
    placement: dict[str, str | int]
    """Role (or comma-joined roles) -> inclusive rank ranges, for example "0-3,5" or "node:1-2" or "all". One key may
    have "rest": all ranks not named elsewhere, for any size of the job."""
    model: Model
    data: Data
    schedule: Schedule = Schedule()
    actor: Actor = Actor()
    critic: Critic = Critic()
    reference: Reference = Reference()
    inference: Inference = Inference()
    reward_model: RewardModel = RewardModel()
    teacher: Teacher = Teacher()
    rollout: Rollout = Rollout()
    env: Env = Env()
    reward: Reward = Reward()
    judge: Judge = Judge()
    batch: Batch = Batch()
    loss: Loss = Loss()
    advantages: Advantages = Advantages()
    on_divergence: OnDivergence = OnDivergence()
    checks: Checks = Checks()
    preference: Preference = Preference()
    evaluation: Evaluation = Evaluation()
    weight_sync: WeightSync = WeightSync()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    residency: Residency = Residency()
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="before")
    @classmethod
    def _reward_of_placed_roles(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("placement"), dict):
            return given
        placed = {role for key in given["placement"] for role in split_roles(str(key))}
        reward = given.get("reward", {})
        names_none = isinstance(reward, dict) and not {"function", "functions"} & {*reward}
        if "env" in placed and "rollout" in placed and "reward" not in placed:
            placement = {
                f"{key}, reward" if "rollout" in split_roles(str(key)) else key: ranks
                for key, ranks in given["placement"].items()
            }
            given = {**given, "placement": placement}
        if "env" in placed and names_none:
            given = {**given, "reward": {**reward, "function": "environment"}}
        elif {*rewarding_roles()} & placed and names_none:
            given = {**given, "reward": {**reward, "functions": []}}
        return given

    def parallel_of(self, role: str) -> tuple[Parallel, str]:
        """Returns the parallel sizes of a role and their config key."""
        section: Any = getattr(self, role, None)
        if not hasattr(section, "parallel"):
            return Parallel(), f"placement.{role}"
        own: Parallel | None = section.parallel
        like = "rollout" if role == "evaluation" else "actor"
        return (getattr(self, like).parallel, f"{like}.parallel") if own is None else (own, f"{role}.parallel")

    def backend_of(self, role: str) -> Backend:
        """Returns the training backend of a role's model."""
        own: Backend | None = getattr(getattr(self, role, None), "backend", None)
        return own or self.actor.backend or "megatron"

    def share_prefixes_of(self, role: str) -> SharePrefixes:
        """Returns whether a role's model computes shared prefixes once."""
        own: SharePrefixes | None = getattr(getattr(self, role), "share_prefixes", None)
        return self.actor.share_prefixes if own is None else own

    @property
    def makes_actor_weights(self) -> bool:
        """Returns whether published weights of the actor are built on demand. They are merged with adapters or brought
        to the device."""
        return self.model.lora is not None or self.keeps_shards_on_host("actor")

    @property
    def makes_served_weights(self) -> bool:
        """Returns whether weights for engines are built on demand. They are as for `makes_actor_weights`, or
        rounded."""
        return self.makes_actor_weights or self.model.fake_quantization is not None

    def model_of(self, role: str) -> Model:
        """Returns section model for a role's model. Roles with other models than the policy have no fake
        quantization."""
        if role in OF_POLICY:
            return self.model
        return self.model.model_copy(update={"fake_quantization": None})

    def predicts(self, role: str) -> bool:
        """Returns whether a role's model has the actor's prediction layer. Such roles receive the actor's weights or
        replace it."""
        shares = self.checkpoint_of(role)[0] == self.model.path and self.backend_of(role) == "megatron"
        return self.model.mtp is not None and role in ("actor", "inference", "reference") and shares

    @property
    def synced_delta(self) -> WeightDelta | None:
        """The settings of syncs with changes only. None for rollout.engine http. Its syncs bring everything, and the
        changes are computed for the files."""
        return None if self.rollout.engine == "http" else self.weight_sync.delta

    def lora_of(self, role: str) -> Lora | None:
        """Returns the adapters trained in a role's model, or None if its own weights are trained."""
        return {"actor": self.model.lora, "critic": self.critic.lora}.get(role)

    def keeps_shards_on_host(self, role: str) -> bool:
        """Returns whether backend fsdp keeps a trained role's model on the host between computations."""
        trained: Trained = getattr(self, role)
        return self.backend_of(role) == "fsdp" and bool(trained.optimizer.cpu_offload)

    def keeps_adapters_apart(self, role: str) -> bool:
        """Returns whether engines of `role` keep the actor's adapters separate from the base."""
        return role == "rollout" and self.model.lora is not None and self.weight_sync.adapters == "apart"

    def freezes_tower_of(self, role: str) -> bool:
        """Returns whether a trained role's model has a vision tower that training does not change."""
        vision, lora = self.model.vision, self.lora_of(role)
        return vision is not None and not (lora.vision if lora else vision.train)

    @property
    def freezes_tower(self) -> bool:
        """Whether training does not change the policy's vision tower."""
        return self.freezes_tower_of("actor")

    def fsdp_of(self, role: str) -> Fsdp:
        """Returns the sharding settings of a role's model for backend fsdp."""
        own: Fsdp | None = getattr(getattr(self, role, None), "fsdp", None)
        return own or self.actor.fsdp or Fsdp()

    def checkpoint_of(self, role: str) -> tuple[str, str]:
        """Returns the folder of a role's starting checkpoint and its config key."""
        own = getattr(getattr(self, role, None), "path", None)
        if isinstance(own, dict):
            own = next(iter(own.values()), None)
        return (own, f"{role}.path") if own else (self.model.path, "model.path")

    def served(self, role: str) -> Served:
        """Returns the engine settings of `role`, a role with engines: its own section of the config.

        Role evaluation gets section rollout, with the engine keys of section evaluation in place of rollout's.
        """
        if role == "evaluation":
            return of_own_engines(self.rollout, self.evaluation)
        section: Served = getattr(self, role)
        return section

    def engine_key(self, role: str, key: str) -> str:
        """Returns the config key of `key` in the result of `served`. Missing keys of role evaluation come from section
        rollout."""
        has_own = role != "evaluation" or key in self.evaluation.engine_keys
        return f"{role}.{key}" if has_own else f"rollout.{key}"

    @property
    def evaluates_apart(self) -> bool:
        """Returns whether evaluation has its own engines."""
        return "evaluation" in self.placed_roles

    @property
    def placed_roles(self) -> frozenset[str]:
        """All roles in the keys of `placement`."""
        return frozenset(role for key in self.placement for role in split_roles(key))

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """The weights of the terms of the reward: its functions, then the placed models."""
        models = (getattr(self, role).weight for role in rewarding_roles() if role in self.placed_roles)
        return (*(part.weight for part in self.reward.parts), *models)

    @property
    def evaluations(self) -> list[EvaluationPlan]:
        """The plans of all evaluation sets, with data.eval first."""
        return evaluation_plans(self.evaluation, self.data.eval, self.rollout.sampling)

    @property
    def stop_metric(self) -> str | None:
        """The metric compared with evaluation.stop_at. None if no metric ends the run early."""
        if self.evaluation.stop_at is None or not self.evaluations:
            return None
        by_default = ("loss" if self.algorithm == "sft" else "accuracy") if self.scores_held_out else "score"
        return self.evaluation.stop_metric or f"{self.evaluations[0].prefix}/{by_default}"

    @property
    def scores_held_out(self) -> bool:
        """Returns whether an evaluation computes the actor's loss on the rows of data.eval, without generated
        responses."""
        actor_alone = self.placed_roles <= {"actor"} and not self.evaluation.sets
        return self.algorithm in ("dpo", "reward_model") or (self.algorithm == "sft" and actor_alone)

    @property
    def checkpoint_dir(self) -> str:
        """The folder of this run's checkpoints."""
        return self.checkpoint.dir or f"{self.output_dir}/checkpoints"
