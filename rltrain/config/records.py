"""The config's sections on what a run leaves behind: checkpoints and logs."""

from typing import Annotated, Literal

from rltrain.config.section import Count, NonNegative, NonNegativeInt, Positive, Section, Words


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
