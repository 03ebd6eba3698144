"""Every key a config file may hold: type, default and meaning. Objects are frozen; unknown keys are refused."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rltrain.config.data import Curriculum as Curriculum
from rltrain.config.data import Data as Data
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
from rltrain.config.models import Teacher as Teacher
from rltrain.config.models import Trained as Trained
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

# The config section of what must hold while a run goes on.


class Checks(Section):
    """Trainer and engine, compared after every step on response tokens that were drawn by the weights which the step
    began with: of older ones they differ by right. null: no limit. And replicas of models that learn, with each
    other and with what engines have."""

    max_logprob_diff: Positive | None = None
    """Of train/fresh_logprob_abs_diff, the mean difference of log-probs."""
    max_kl: Positive | None = None
    """Of train/fresh_kl, the KL of the trainer from the engine."""
    action: Literal["stop", "pause", "warn"] = "stop"
    """Beyond a limit. stop: the run ends, and the last checkpoint stays the last: none is saved of weights that were
    trained on such tokens. pause: it is saved at the end of its step and ends with an error, to go on from there when
    it is started again."""
    replicas: NonNegativeInt = 0
    """Every so many steps (0: never) ranks with the same part of the actor or the critic compare checksums of all their
    weights, and the run ends where one differs, whose rank and parameter are named: a processor that computes wrong
    numbers, or a memory that does not keep them. With the weights of such a step engines' are compared too, as
    weight_sync.verify has it done with every sync."""


# The config section preference: what algorithms that learn from pairs make of them.


class Preference(Section):
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """dpo: sigmoid is its own, ipo the squared distance from 1 / (2 beta)."""
    beta: Positive = 0.1
    """dpo: how near the actor stays to the reference; the larger, the nearer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo with loss sigmoid: the share of pairs that are taken to be the wrong way round."""
    sft_coef: NonNegative = 0.0
    """dpo: weight of the chosen responses' negative log-prob per token beside the loss."""
    center_coef: NonNegative = 0.0
    """reward_model: weight of the square of the sum of a pair's scores, which keeps scores around 0."""


# Config section weight_sync.delta.


class WeightDelta(Section):
    """The weight sync sends what changed since the last one, bit for bit what it would have sent otherwise. With
    rollout.engine http it sends everything to the rollout's ranks, and these write what changed to
    rollout.http.weights_dir, for servers that take it: launch/serve.py, and SGLang with rltrain's plugin."""

    full_every: Count = 50
    """Syncs from one that sends everything to the next. So do the first of a job, every one that finds an engine
    without the weights of the last, and some behind one that saved nothing because nearly all had changed. Of files,
    whole ones are written as well once those of what changed have as many bytes."""
    check_every: NonNegativeInt = 0
    """Syncs of what changed from one behind which checksums of both sides are compared, as weight_sync.verify does
    after every sync, to the next; 0: the first of a job alone. Where they differ everything is sent at once, and later
    ones are all compared. Not for files: those who apply them check what comes of it every time."""
    keep_on: Literal["device", "host"] = "device"
    """Where a rank keeps what it sent or wrote last: as many bytes as when that is everything."""
    in_shared_memory: bool = False
    """Compare what passes through memory that ranks of a node share on CPUs as well. To copy all of it takes no longer,
    so this is for measuring and for tests."""


# The config's sections on what a run leaves behind: checkpoints and logs.


class MemoryCheckpoints(Section):
    """Checkpoints of the whole run in the nodes' memory, each node's on the next node too."""

    interval: Count = 1
    """Steps between them."""
    folder: str = "/dev/shm"
    """A folder of every node's own, in memory (a tmpfs); $NAME stands for a variable of the node's environment. Up to
    four checkpoints are in it: of each the files of the node's ranks, and those of the node before. A job whose
    node has no room for three is refused."""


class Checkpoint(Section):
    save_hf: bool = True
    """Write the trained actor in Hugging Face format to <output_dir>/hf at the end."""
    save_hf_interval: NonNegativeInt = 0
    """Steps between further exports of the actor, to <output_dir>/hf_steps/step_<number>; 0: none."""
    save_interval: NonNegativeInt = 0
    """Steps between checkpoints of the whole run, from which it goes on as if it had never stopped. One is saved after
    the last step too. 0: none by steps."""
    save_every_s: NonNegative | None = 600.0
    """Seconds between checkpoints of the whole run, which are saved at the end of a step, beside those of
    save_interval. A run that has saved one saves after its last step too. 0 or null: none by time. Where either key
    asks for checkpoints, SIGTERM, SIGUSR1 and Ctrl-C save one as well."""
    dir: str | None = None
    """A folder that all nodes see. None: <output_dir>/checkpoints."""
    keep: NonNegativeInt = 2
    """How many of the newest checkpoints stay; 0: all."""
    resume: Annotated[str, Words("auto, none, or the folder of a checkpoint")] = "auto"
    """auto: go on from the newest intact checkpoint in checkpoint.dir, and start anew where there is none; none: start
    anew; or the folder of a checkpoint: later ones in checkpoint.dir are then set aside. A job that torchrun has
    restarted goes on from what it saved itself."""
    asynchronous: bool = True
    """Write while training goes on, from a copy on the host; false: training waits until all is durable."""
    stop_within_s: Positive = 300.0
    """After SIGTERM or SIGUSR1 the job saves at the end of its step and ends. Where that takes longer it ends without
    having saved."""
    memory: MemoryCheckpoints | None = None
    """Checkpoints in the nodes' memory too, such as {interval: 1}: a job that torchrun has restarted, or that is
    started again, goes on from the newest one, as long as no two neighbouring nodes were lost. They are removed at the
    end of the run."""

    @property
    def saves(self) -> bool:
        """Whether checkpoints of the whole run go to the disk, by steps or by time."""
        return bool(self.save_interval or self.save_every_s)


class Wandb(Section):
    project: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] | None = None
    """None: online with a key, offline without."""


class Logging(Section):
    progress: bool = True
    trace: bool = False
    """Write <output_dir>/trace/: every rank's tasks, transfers and memory moves, for Perfetto and tools/report.py."""
    samples: NonNegativeInt = 4
    """Responses per step written to <output_dir>/samples.jsonl with prompt and reward. `rendered_prompt` is what the
    model was shown, where the chat template, the tokenizer or an environment makes another text of the prompt."""
    sample_ids: bool = False
    """Write the ids of all samples that each step trained on to <output_dir>/sample_ids/."""
    tensorboard: bool = False
    """Write all metrics to <output_dir>/tensorboard; needs the package tensorboard."""
    wandb: Wandb = Wandb()


class WeightSync(Section):
    bucket_mb: Count = 32
    """Mebibytes that a rank packs, and that it receives, at a time; two of each are in flight. Ranks that read each
    other's memory, as on CPUs, do so by at most 4."""
    transport: Literal["planned", "full_gather"] = "planned"
    """full_gather assembles every tensor in full on every rank, slowly: what the planned one must equal."""
    verify: bool = False
    """After every sync compare checksums of what both sides hold, which reads each once; the job ends if a tensor
    differs. An SGLang server compares what it has copied too, and is replaced where it differs."""
    delta: WeightDelta | None = None
    """null: every sync sends everything."""
    adapters: Literal["merged", "apart"] = "merged"
    """With model.lora: engines get weights with the adapters merged. apart: the rollout's engines keep the base, which
    the first sync brings, and the adapters, which every sync brings, beside each other."""


class Schedule(Section):
    """How the tasks of different steps and roles overlap. What is legal follows from the placement."""

    mode: Literal["sequential", "pipelined", "asynchronous"] = "sequential"
    """sequential: step by step. pipelined: prompt groups that are done are worked on while others still decode.
    asynchronous: the rollout is up to max_staleness steps ahead of training."""
    chunks: Count | None = None
    """Parts of a step that travel on their own, in the order in which prompt groups get done. None: 4 when pipelined,
    else 1."""
    max_staleness: NonNegativeInt = 0
    """Training step less policy version of any token trained on, at most."""
    on_stale: Literal["drop", "mask", "correct"] = "drop"
    """What becomes of samples with tokens over the limit: they are left out, or those tokens are, or they are trained
    on, weighed as loss.correction says. Counted in either case."""
    partial_rollouts: bool = False
    """A generate task ends when enough prompt groups are done; the others go on in the next one."""
    oversampling: Positive = 0.25
    """With partial_rollouts: prompt groups in flight beyond those of a step, as a fraction of these."""
    sync_every: Count = 1
    """Steps from one weight sync to the next; max_staleness is then at least one less."""
    in_flight_sync: bool = True
    """asynchronous: engines take new weights between two decode steps; false: between two generate tasks."""


class Residency(Section):
    """Roles that share ranks give the device to each other in turn."""

    communicators: Literal["keep", "release"] = "keep"
    """release destroys the communicators of a role once all its ranks have left the device, and makes them again when
    it returns."""
    prefetch: bool = True
    """Bring the next role's memory back while the present task ends, where it fits."""
    allocator: Literal["torch", "torch_memory_saver"] = "torch"
    """torch_memory_saver, where installed, releases physical memory under unchanged addresses."""


class Timeouts(Section):
    """Limits of waits for other ranks. They run only while no rank of the job shows progress."""

    no_progress_s: Positive = 1800.0
    """The job then ends with a message that names the rank, its role, task and step. Longer than the longest piece of
    work without progress: a micro-batch, a decode step, a reward, a checkpoint file, a first compilation."""
    lost_s: Positive = 300.0
    """Without a sign of life of a rank for this long its host counts as lost or cut off, and the job ends, whoever else
    still gets on; so do ranks whom the job's store has not answered for as long. Longer than the longest call that
    holds Python's interpreter lock."""
    tasks: dict[str, float] = Field(default_factory=dict)
    """Limits of their own for tasks by name, such as {generate: 7200}."""


class Config(Section):
    """The config of a job.

    Where role env is placed and no reward function is named, the reward is what environments give. Where role reward is
    not placed then, it is on the rollout's ranks. Where a model scores responses, no environment is placed and no
    function is named, the model's score is the reward.
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
    """own: advantages.function says what advantages are. evaluate: nothing is trained, model.path is evaluated
    (launch/evaluate.py)."""
    steps: Count
    seed: NonNegativeInt = 0
    output_dir: str = "runs/default"
    placement: dict[str, str | int]
    """Role (or comma-joined roles) -> inclusive rank ranges, for example "0-3,5" or "node:1-2" or "all". One key may
    say "rest": the ranks that no other one names, however many the job is started with."""
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
        """The parallel sizes of a role and the config key that gives them."""
        section: Any = getattr(self, role, None)
        if not hasattr(section, "parallel"):
            return Parallel(), f"placement.{role}"
        own: Parallel | None = section.parallel
        like = "rollout" if role == "evaluation" else "actor"
        return (getattr(self, like).parallel, f"{like}.parallel") if own is None else (own, f"{role}.parallel")

    def backend_of(self, role: str) -> Backend:
        """The training backend of a role's model."""
        own: Backend | None = getattr(getattr(self, role, None), "backend", None)
        return own or self.actor.backend or "megatron"

    @property
    def makes_actor_weights(self) -> bool:
        """Whether what others get of the actor's weights is made when they get it: merged with adapters, or brought to
        the device."""
        return self.model.lora is not None or self.keeps_shards_on_host("actor")

    @property
    def makes_served_weights(self) -> bool:
        """Whether what engines get of the actor's weights is made when they get it: as `makes_actor_weights`, or
        rounded."""
        return self.makes_actor_weights or self.model.fake_quantization is not None

    def model_of(self, role: str) -> Model:
        """What section model says of a role's model. Another's than the policy's computes with weights as they are."""
        if role in OF_POLICY:
            return self.model
        return self.model.model_copy(update={"fake_quantization": None})

    def predicts(self, role: str) -> bool:
        """Whether a role's model has the layer that predicts a further token as the actor has, which trains it: such as
        get the actor's weights, or take its place."""
        shares = self.checkpoint_of(role)[0] == self.model.path and self.backend_of(role) == "megatron"
        return self.model.mtp is not None and role in ("actor", "inference", "reference") and shares

    @property
    def synced_delta(self) -> WeightDelta | None:
        """weight_sync.delta where syncs send what changed. To servers that somebody else runs it is files that hold no
        more than that, made of what a sync has brought."""
        return None if self.rollout.engine == "http" else self.weight_sync.delta

    def lora_of(self, role: str) -> Lora | None:
        """The adapters that a role's model learns in the place of its weights, if it does."""
        return {"actor": self.model.lora, "critic": self.critic.lora}.get(role)

    def keeps_shards_on_host(self, role: str) -> bool:
        """Whether all that backend fsdp has of a trained role's model is on the host between what it computes."""
        trained: Trained = getattr(self, role)
        return self.backend_of(role) == "fsdp" and bool(trained.optimizer.cpu_offload)

    def keeps_adapters_apart(self, role: str) -> bool:
        """Whether engines of `role` have the actor's adapters beside its base, and not merged with it."""
        return role == "rollout" and self.model.lora is not None and self.weight_sync.adapters == "apart"

    def fsdp_of(self, role: str) -> Fsdp:
        """How a role's model is sharded where its backend is fsdp."""
        own: Fsdp | None = getattr(getattr(self, role, None), "fsdp", None)
        return own or self.actor.fsdp or Fsdp()

    def checkpoint_of(self, role: str) -> tuple[str, str]:
        """The folder that a role's model starts from and the config key that gives it."""
        own = getattr(getattr(self, role, None), "path", None)
        if isinstance(own, dict):
            own = next(iter(own.values()), None)
        return (own, f"{role}.path") if own else (self.model.path, "model.path")

    def served(self, role: str) -> Served:
        """What is said of the engines of a role that has such."""
        if role == "evaluation":
            return of_own_engines(self.rollout, self.evaluation)
        section: Served = getattr(self, role)
        return section

    def engine_key(self, role: str, key: str) -> str:
        """Where `key` of what `served` gives stands: what role evaluation does not say is of section rollout."""
        has_own = role != "evaluation" or key in self.evaluation.engine_keys
        return f"{role}.{key}" if has_own else f"rollout.{key}"

    @property
    def evaluates_apart(self) -> bool:
        """Whether engines of their own evaluate."""
        return "evaluation" in self.placed_roles

    @property
    def placed_roles(self) -> frozenset[str]:
        """All that the keys of `placement` name."""
        return frozenset(role for key in self.placement for role in split_roles(key))

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """Of what the reward is the sum of: its functions, then the models that are placed for it."""
        models = (getattr(self, role).weight for role in rewarding_roles() if role in self.placed_roles)
        return (*(part.weight for part in self.reward.parts), *models)

    @property
    def evaluations(self) -> list[EvaluationPlan]:
        """Of every evaluation set: data.eval's first."""
        return evaluation_plans(self.evaluation, self.data.eval, self.rollout.sampling)

    @property
    def stop_metric(self) -> str | None:
        """The metric that evaluation.stop_at is about; None where nothing is to end the run early."""
        if self.evaluation.stop_at is None or not self.evaluations:
            return None
        by_default = ("loss" if self.algorithm == "sft" else "accuracy") if self.scores_held_out else "score"
        return self.evaluation.stop_metric or f"{self.evaluations[0].prefix}/{by_default}"

    @property
    def scores_held_out(self) -> bool:
        """Whether an evaluation is the loss of the rows of data.eval under the actor, which nobody answers."""
        actor_alone = self.placed_roles <= {"actor"} and not self.evaluation.sets
        return self.algorithm in ("dpo", "reward_model") or (self.algorithm == "sft" and actor_alone)

    @property
    def checkpoint_dir(self) -> str:
        """The folder of this run's checkpoints."""
        return self.checkpoint.dir or f"{self.output_dir}/checkpoints"
