"""Which checkpoint a run goes on from, and which ones it refuses."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.checkpoint.run.files import MANIFEST_FILE, Contents, write_files
from rltrain.checkpoint.run.folder import CheckpointFolder, Resumed, name_of
from rltrain.cluster.world import Bulletin, World
from rltrain.config.loader import load_config
from rltrain.config.schema import Config, Timeouts
from rltrain.errors import CheckpointError
from rltrain.resuming import check_resumed, find_checkpoint, rewind_logs
from tests.unit.shared_store import Jobs, open_store

CONFIG = """\
steps: 10
placement: {'actor, reference': 0, 'rollout, reward': 1}
model: {path: models/tiny}
data: {train: {path: train.jsonl}}
checkpoint: {save_interval: 2}
"""
NUM_RANKS = 2


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, NUM_RANKS)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    (tmp_path / "config.yaml").write_text(CONFIG)

    def load(*overrides: str) -> Config:
        return load_config(tmp_path / "config.yaml", [f"output_dir={tmp_path}/run", *overrides])

    return load


@pytest.fixture
def saved(config: Callable[..., Config]) -> CheckpointFolder:
    """Checkpoints of the steps 2, 4 and 6, with files of both ranks."""
    folder = CheckpointFolder(Path(config().checkpoint_dir))
    for step in (2, 4, 6):
        files = {f"actor/rank_{rank}.safetensors": Contents({"x": torch.ones(9)}, {}) for rank in range(NUM_RANKS)}
        run = {"config": config().model_dump(mode="json"), "architectures": {}}
        folder.complete(step, write_files(folder.begin(step), files), run, keep=3)
    return folder


@pytest.fixture
def find(jobs: Jobs) -> Callable[..., Resumed | None]:
    """What all ranks agree on."""

    def on_all(config: Config, restarted: bool = False) -> Resumed | None:
        def body(rank: int, store: dist.Store) -> Resumed | CheckpointError | None:
            limits = Timeouts(no_progress_s=3)
            world = World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, 10, limits, restarted)
            try:
                return find_checkpoint(config, Bulletin(world, guarded=True))
            except CheckpointError as error:
                store.set("bulletin/resume/candidates", "[]")  # the job has ended; nobody is to wait for rank 0
                return error

        first, *others = jobs.run(body, NUM_RANKS)
        if isinstance(first, CheckpointError):
            raise first
        assert others == [first]
        return first

    return on_all


def harm(checkpoint: Path, file: str) -> str:
    """One bit of `file` turns; its path."""
    path = checkpoint / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return str(path)


def test_the_newest_checkpoint_is_taken(find, config, saved) -> None:
    found = find(config())
    assert (found.step, found.folder) == (6, saved.path / name_of(6))


def test_a_run_without_checkpoints_starts_at_its_first_step(find, config) -> None:
    assert find(config()) is None


@pytest.mark.parametrize("file", ["actor/rank_0.safetensors", "actor/rank_1.safetensors", "run.json", MANIFEST_FILE])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(find, config, saved, caplog, file) -> None:
    for step in (6, 4):
        harm(saved.path / name_of(step), file)
    with caplog.at_level(logging.WARNING):
        assert find(config()).step == 2
    for step in (6, 4):
        path = saved.path / name_of(step) / file
        assert sum(f"the checkpoint of step {step} cannot be used: {path}" in text for text in caplog.messages) == 1


def test_a_run_all_of_whose_checkpoints_are_damaged_is_refused(find, config, saved) -> None:
    for step in (2, 4, 6):
        (saved.path / name_of(step) / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"none of the 3 checkpoints in {saved.path} is intact; name another"):
        find(config())


def test_one_that_is_asked_for_is_taken_or_refused(find, config, saved, tmp_path) -> None:
    wanted = saved.path / name_of(4)
    assert find(config(f"checkpoint.resume={wanted}")).step == 4
    path = harm(wanted, "actor/rank_1.safetensors")
    with pytest.raises(CheckpointError, match=f"checkpoint.resume: {path} is damaged: its checksum is"):
        find(config(f"checkpoint.resume={wanted}"))
    with pytest.raises(CheckpointError, match="is not a checkpoint of a run"):
        find(config(f"checkpoint.resume={tmp_path}/nowhere"))


def test_a_run_is_not_begun_anew_where_there_are_checkpoints(find, config, saved) -> None:
    with pytest.raises(
        CheckpointError, match="checkpoint.resume: none, but .* holds checkpoints, the newest of step 6"
    ):
        find(config("checkpoint.resume=none"))
    assert find(config("checkpoint.resume=none"), restarted=True).step == 6, "they are its own"


def test_what_interrupted_saves_left_is_removed(find, config, saved) -> None:
    saved.begin(8)
    (saved.path / f".{name_of(2)}.replaced").mkdir()
    find(config())
    assert sorted(path.name for path in saved.path.iterdir()) == ["latest", *map(name_of, (2, 4, 6))]


@pytest.mark.parametrize(
    "override, message",
    [
        ("seed=7", "seed is 7, but it was saved with 0"),
        ("batch.prompts_per_step=5", "batch.prompts_per_step is 5, but it was saved with"),
        ("data.shuffle=false", "data.shuffle is False, but it was saved with True"),
        ("steps=5", "steps is 5, but it was saved after step 6"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(config, saved, override, message) -> None:
    checkpoint = saved.candidates()[0]
    check_resumed(config(), {}, checkpoint)
    with pytest.raises(CheckpointError, match=f"checkpoint.resume: {checkpoint.folder} does not fit .*{message}"):
        check_resumed(config(override), {}, checkpoint)


def test_the_logs_of_a_run_that_has_saved_nothing_are_taken_back_only_when_it_is_restarted(config, tmp_path) -> None:
    output = Path(config().output_dir)
    output.mkdir()
    (output / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    (output / "samples.jsonl").write_text("{}\n")
    rewind_logs(config(), None, restarted=False)
    assert (output / "metrics.jsonl").read_text() and (output / "samples.jsonl").read_text()
    rewind_logs(config(), None, restarted=True)
    assert not (output / "metrics.jsonl").read_text() and not (output / "samples.jsonl").read_text()
