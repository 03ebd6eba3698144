"""Output folders are locked, and a run resumes from its newest undamaged checkpoint."""

import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.checkpoint.run_files import MANIFEST_FILE, Contents, write_files
from rltrain.checkpoint.run_folder import CheckpointFolder, Resumed, name_of
from rltrain.cli.report_run import read_run
from rltrain.config.loader import load_config
from rltrain.config.schema import Config, Timeouts
from rltrain.errors import CheckpointError, ConfigError
from rltrain.observability.run_logs import ID_FILE, read_id
from rltrain.roles import resuming
from rltrain.roles.resuming import (
    LOCK_FILE,
    NO_LOCKS,
    check_resumed,
    claim_folders,
    find_checkpoint,
    lock_folder,
    open_history,
    set_aside,
)
from rltrain.roles.role import SampleLog
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.support.shared_store import Jobs, open_store


@contextmanager
def locked(folder: Path, text: str = "") -> Iterator[None]:
    """Holds the lock of `folder` inside, with `text` in the lock file."""
    folder.mkdir(exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        yield


HOLDER = {"host": "node7", "pid": 1234, "since": "2026-01-02 03:04:05 +0000"}


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Returns the locks of this process. All are released after the test."""
    held: dict[Path, int] = {}
    monkeypatch.setattr(resuming, "_held", held)
    return held


def release(held: dict[Path, int]) -> None:
    for descriptor in held.values():
        os.close(descriptor)
    held.clear()


def test_a_folder_is_made_and_held_with_its_holder_written_down(tmp_path: Path, held: dict[Path, int]) -> None:
    folder = tmp_path / "new" / "run"
    lock_folder(folder, "output_dir")
    with (folder / LOCK_FILE).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder = json.loads((folder / LOCK_FILE).read_text())
    assert (holder["host"], holder["pid"]) == (platform.node(), os.getpid())
    lock_folder(folder / ".", "checkpoint.dir", wait_s=0)
    assert list(held) == [folder], "the lock holds for every name of the folder"
    release(held)
    lock_folder(folder, "output_dir", wait_s=0)


@pytest.mark.parametrize(
    "text, holder",
    [
        (json.dumps(HOLDER), "process 1234 on node7 since 2026-01-02 03:04:05 +0000"),
        ("", "{path} does not say which"),
        ("[]", "{path} does not say which"),
    ],
)
def test_a_second_job_is_refused_with_the_first_ones_name(tmp_path: Path, text: str, holder: str) -> None:
    with locked(tmp_path, text), pytest.raises(ConfigError) as refused:
        lock_folder(tmp_path, "output_dir", wait_s=0)
    named = holder.format(path=tmp_path / LOCK_FILE)
    assert str(refused.value).startswith(f"output_dir: {tmp_path} is in use by another job ({named}), whose files")
    lock_folder(tmp_path, "output_dir", wait_s=0)


def test_it_waits_for_a_job_that_is_about_to_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waited = threading.Event()

    def hold() -> None:
        with locked(tmp_path, json.dumps(HOLDER)):
            holds.set()
            assert waited.wait(20)

    holds, thread = threading.Event(), threading.Thread(target=hold)
    thread.start()
    assert holds.wait(20)
    with caplog.at_level(logging.WARNING):
        lock_folder(tmp_path, "output_dir", wait_s=60, advance=waited.set)
    thread.join()
    assert caplog.text.count("is in use by another job (process 1234 on node7 since") == 1, "the wait is logged once"


def test_a_job_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\nfrom rltrain.roles.resuming import lock_folder\n"
        "lock_folder(pathlib.Path(sys.argv[1]), 'output_dir')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] != os.getpid()
    lock_folder(tmp_path, "output_dir", wait_s=0)


@pytest.mark.parametrize("number", sorted(set(NO_LOCKS)))
def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(resuming.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        lock_folder(tmp_path, "output_dir", wait_s=0)
    assert f"{tmp_path} cannot be locked" in caplog.text


def test_a_lock_that_cannot_be_written_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(resuming.os, "pwrite", full)
    with pytest.raises(ConfigError, match=f"checkpoint.dir: cannot write {tmp_path}/{LOCK_FILE}: No space left"):
        lock_folder(tmp_path, "checkpoint.dir", wait_s=0)
    monkeypatch.undo()
    lock_folder(tmp_path, "checkpoint.dir", wait_s=0)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_set_aside_gets_a_new_folder_each_time(tmp_path: Path, keep: bool) -> None:
    paths = [tmp_path / "metrics.jsonl", tmp_path / "trace"]
    (tmp_path / "earlier_2").symlink_to("nowhere")
    for number in (1, 3):
        paths[0].write_text(f"{number}")
        paths[1].mkdir(exist_ok=True)
        (paths[1] / "rank0.json").write_text(f"{number}")
        folder = set_aside(paths, "output_dir", keep=keep)
        assert folder == tmp_path / f"earlier_{number}"
        assert [(folder / name).read_text() for name in ("metrics.jsonl", "trace/rank0.json")] == [f"{number}"] * 2
        assert [path.exists() for path in paths] == [keep, keep]
    paths[0].unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="output_dir: cannot write .*earlier_4: No such file"):
        set_aside(paths, "output_dir", keep=keep)


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
    """Returns checkpoints of the steps 2, 4 and 6, with files of both ranks."""
    folder = CheckpointFolder(Path(config().checkpoint_dir))
    for step in (2, 4, 6):
        files = {f"actor/rank_{rank}.safetensors": Contents({"x": torch.ones(9)}, {}) for rank in range(NUM_RANKS)}
        run = {"config": config().model_dump(mode="json"), "architectures": {}}
        folder.complete(step, write_files(folder.begin(step), files), run, keep=3)
    return folder


@pytest.fixture
def find(jobs: Jobs) -> Callable[..., Resumed | None]:
    """Returns a function that finds the checkpoint on which all ranks agree."""

    def on_all(config: Config, restarted: bool = False) -> Resumed | None:
        def body(rank: int, store: dist.Store) -> Resumed | CheckpointError | None:
            limits = Timeouts(no_progress_s=3)
            world = World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, 10, limits, restarted)
            try:
                return find_checkpoint(config, JobStore(world, guarded=True))
            except CheckpointError as error:
                store.set("job_store/resume/candidates", "[]")  # the job has ended, so no rank waits for rank 0
                return error

        first, *others = jobs.run(body, NUM_RANKS)
        if isinstance(first, CheckpointError):
            raise first
        assert others == [first]
        return first

    return on_all


def harm(checkpoint: Path, file: str) -> str:
    """Flips one bit of `file` and returns its path."""
    path = checkpoint / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return str(path)


def test_the_newest_checkpoint_is_taken(find, config, saved) -> None:
    found = find(config())
    assert (found.step, found.folder) == (6, saved.path / name_of(6))


def test_a_finished_run_that_is_started_again_says_how_to_go_on(find, config, saved, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert find(config("steps=7")).step == 6 and "is finished" not in caplog.text
        assert find(config("steps=6")).step == 6
    assert f"{config().output_dir} is finished: all of its 6 steps are done" in caplog.messages[-1]
    assert "(steps=12)" in caplog.messages[-1] and "another output_dir" in caplog.messages[-1]


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
    assert find(config("checkpoint.resume=none"), restarted=True).step == 6, "the checkpoints are the run's own"


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


class History:
    """The files of a run: one line of metrics and one of samples per step, and checkpoints."""

    def __init__(self, config: Config) -> None:
        self.config, self.output = config, Path(config.output_dir)
        self.checkpoints = CheckpointFolder(Path(config.checkpoint_dir))

    def log(self, *steps: int) -> None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            with (self.output / name).open("a") as file:
                file.writelines(json.dumps({"step": step}) + "\n" for step in steps)

    def save(self, step: int) -> None:
        logs = {"samples.jsonl": (self.output / "samples.jsonl").stat().st_size}
        files = {"ranks/rank_00000.safetensors": Contents({"x": torch.ones(1)}, {"logs": json.dumps(logs)})}
        run = {"history": read_id(self.output / ID_FILE)}
        self.checkpoints.complete(step, write_files(self.checkpoints.begin(step), files), run, keep=0)

    def begin(self, checkpoint: Resumed | None = None) -> None:
        self.output.mkdir(exist_ok=True)
        open_history(self.config, checkpoint)

    def run(self, first: int, last: int) -> None:
        """Writes steps `first` to `last`, with a checkpoint after every second one."""
        for step in range(first, last + 1):
            self.log(step)
            if step % 2:
                self.save(step + 1)

    @property
    def saved(self) -> list[int]:
        return [found.step for found in self.checkpoints.candidates()]


def logged(folder: Path) -> list[list[int]]:
    """Returns the steps in each log."""
    logs = [folder / name for name in ("metrics.jsonl", "samples.jsonl")]
    return [[json.loads(line)["step"] for line in log.read_text().splitlines()] for log in logs if log.exists()]


@pytest.fixture
def history(config) -> History:
    """Returns the files of a run with steps 0 to 6 and checkpoints after 2, 4 and 6."""
    run = History(config())
    run.begin()
    run.run(0, 6)
    return run


def test_a_run_that_goes_on_takes_back_what_it_logged_since(history) -> None:
    history.begin(history.checkpoints.candidates()[0])
    assert logged(history.output) == [[*range(6)]] * 2
    assert not list(history.output.glob("earlier_*")) and history.saved == [6, 4, 2]
    history.run(6, 7)
    history.begin(history.checkpoints.candidates()[0])
    assert logged(history.output) == [[*range(8)]] * 2


def test_a_run_that_is_sent_back_keeps_apart_what_came_after(history, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        history.begin(history.checkpoints.candidates()[-1])
    assert logged(history.output) == [[0, 1]] * 2 and history.saved == [2]
    assert logged(history.output / "earlier_1") == [[*range(7)]] * 2
    kept = CheckpointFolder(history.checkpoints.path / "earlier_1")
    assert [found.step for found in kept.candidates()] == [6, 4]
    assert f"step_0000006, step_0000004: moved to {kept.path}" in caplog.text
    history.run(2, 4)
    assert history.saved == [4, 2], "the newest checkpoint is of the resumed run"
    history.begin(kept.candidates()[0])
    assert logged(history.output) == [], "the logs have later steps of another history"
    assert logged(history.output / "earlier_2") == [[*range(5)]] * 2
    assert history.saved == []


def test_a_second_run_keeps_the_first_ones_model(config, caplog) -> None:
    run = History(config())
    run.begin()
    run.run(0, 1)
    exported = run.output / "hf" / "model.safetensors"
    exported.parent.mkdir()
    exported.write_text("first")
    run.begin()
    assert not exported.exists() and (run.output / "earlier_1/hf/model.safetensors").read_text() == "first"
    assert f"the logs and exported models of an earlier run are now in {run.output / 'earlier_1'}" in caplog.text


def test_a_model_that_the_second_run_starts_from_is_copied(config) -> None:
    run = History(config())
    run.begin()
    run.log(0)
    (run.output / "hf").mkdir()
    (run.output / "hf" / "model.safetensors").write_text("first")
    again = History(config(f"model.path={run.output}/hf"))
    again.begin()
    for folder in (run.output, run.output / "earlier_1"):
        assert (folder / "hf" / "model.safetensors").read_text() == "first"
    assert logged(run.output) == [] and logged(run.output / "earlier_1") == [[0]] * 2


class ElasticHistory(History):
    """A run with sample logs of a changing number of ranks. Its checkpoints contain only the sizes of these logs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.begin()
        self.earlier: dict[str, int] = {}

    def go_on(self, num_ranks: int, last: int, *, saved: int | None) -> None:
        """Continues from the newest checkpoint up to step `last`, and saves at step `saved`."""
        found = self.checkpoints.candidates()
        self.earlier = open_history(self.config, found[0]) if found else {}
        logs = [SampleLog(self.config.output_dir, f"sample_ids/rank{rank}.jsonl") for rank in range(num_ranks)]
        for step in range(found[0].step if found else 0, last + 1):
            if step == saved:
                self.save_logs(step, logs)
            for rank, log in enumerate(logs):
                log.append({"step": step, "of": [rank, num_ranks]})

    def save_logs(self, step: int, logs: list[SampleLog]) -> None:
        sizes = [{log.name: log.num_bytes} for log in logs]
        sizes[0] = self.earlier | sizes[0]
        files = {
            f"ranks/rank_{rank:05d}.safetensors": Contents({"x": torch.ones(1)}, {"logs": json.dumps(of_rank)})
            for rank, of_rank in enumerate(sizes)
        }
        run = {"history": read_id(self.output / ID_FILE)}
        self.checkpoints.complete(step, write_files(self.checkpoints.begin(step), files), run, keep=0)

    def logged(self) -> list[tuple[int, int, int]]:
        """Returns (step, number of ranks, rank) of all log entries."""
        lines = [line for path in self.output.glob("sample_ids/*") for line in path.read_text().splitlines()]
        return sorted((record["step"], record["of"][1], record["of"][0]) for record in map(json.loads, lines))


def test_ranks_that_come_and_go_leave_every_sample_in_the_logs_once(config) -> None:
    run = ElasticHistory(config())
    run.go_on(4, 3, saved=2)
    run.go_on(2, 5, saved=4)  # old ranks 2 and 3 are gone, their saved logs are not
    run.go_on(5, 6, saved=None)  # ranks 2 to 4 are not in the checkpoint
    run.go_on(3, 7, saved=6)
    run.go_on(4, 6, saved=None)
    worlds = [4, 4, 2, 2, 3, 3, 4]
    assert run.logged() == [(step, size, rank) for step, size in enumerate(worlds) for rank in range(size)]


@pytest.mark.parametrize("save_interval", [0, 2])
def test_a_run_that_begins_anew_keeps_the_logs_of_another_apart(config, caplog, save_interval) -> None:
    runs = [History(config(f"checkpoint={{save_interval: {save_interval}, resume: none}}")) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        for number, run in enumerate(runs):
            run.begin()
            (run.output / "trace").mkdir(exist_ok=True)
            (run.output / "trace" / "rank0.json").write_text(f"[{number}]")
            run.log(0, 1, number + 2)
    for number, folder in enumerate([run.output / "earlier_1", run.output / "earlier_2", run.output]):
        assert logged(folder) == [[0, 1, number + 2]] * 2
        assert (folder / "trace" / "rank0.json").read_text() == f"[{number}]"
        assert read_run(folder).records[-1]["step"] == number + 2, "the report can read it"
    assert caplog.text.count("the logs and exported models of an earlier run are now in") == 2


def test_a_run_goes_on_from_its_checkpoints_and_not_after_the_logs_of_another(history, config) -> None:
    """Between two runs, another run without checkpoints used the folder."""
    other = History(config("checkpoint={save_interval: 0, resume: none}"))
    other.begin()
    other.log(0, 1, 2)
    history.begin(history.checkpoints.candidates()[0])
    assert logged(history.output) == [] and history.saved == [6, 4, 2]
    assert logged(history.output / "earlier_1") == [[*range(7)]] * 2
    assert logged(history.output / "earlier_2") == [[0, 1, 2]] * 2


def test_a_run_that_goes_on_from_anothers_checkpoint_begins_logs_and_checkpoints_of_its_own(history, config) -> None:
    branch = History(config(f"output_dir={history.output}_branch"))
    branch.begin()
    branch.run(0, 3)
    branch.begin(history.checkpoints.candidates()[0])
    assert logged(branch.output) == [] and branch.saved == []
    assert logged(branch.output / "earlier_1") == [[*range(4)]] * 2
    assert logged(history.output) == [[*range(7)]] * 2 and history.saved == [6, 4, 2], "the other run's folders stay"


def test_a_run_that_saves_nothing_leaves_the_checkpoints_of_others_where_they_are(history, config) -> None:
    settings = f"checkpoint={{save_every_s: 0, dir: {history.checkpoints.path}}}"
    branch = History(config(f"output_dir={history.output}_branch", settings))
    branch.begin(history.checkpoints.candidates()[-1])
    assert history.saved == [6, 4, 2]


@pytest.fixture
def claim(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], None]:
    """Returns a function for claiming folders on all ranks. Rank 1 is the actor's leader, and its error is raised."""
    monkeypatch.setattr(resuming.lock_folder, "__kwdefaults__", {"wait_s": 0.0, "advance": lambda: None})

    def on_all(config: Config) -> None:
        def body(rank: int, store: dist.Store) -> Exception | None:
            world = World(rank, NUM_RANKS, rank, NUM_RANKS, torch.device("cpu"), store, 10, Timeouts(no_progress_s=3))
            try:
                locks = claim_folders(config, 1, JobStore(world, guarded=True))
                assert all(Path(path).read_text() == text for path, text in locks.values())
                return None
            except ConfigError as error:
                store.set("job_store/folders/claimed", "{}")  # the job has ended
                return error

        first, leader = jobs.run(body, NUM_RANKS)
        assert first is None
        if leader is not None:
            raise leader

    return on_all


def test_a_job_locks_the_folders_that_it_writes_to(claim, config, tmp_path) -> None:
    with locked(tmp_path / "checkpoints"):
        claim(
            config("checkpoint.save_interval=0", "checkpoint.save_every_s=0", f"checkpoint.dir={tmp_path}/checkpoints")
        )
        with pytest.raises(ConfigError, match=f"checkpoint.dir: {tmp_path}/checkpoints is in use by another job"):
            claim(config(f"checkpoint.dir={tmp_path}/checkpoints", f"output_dir={tmp_path}/other"))
    with locked(tmp_path / "used"), pytest.raises(ConfigError, match=f"output_dir: {tmp_path}/used is in use by"):
        claim(config(f"output_dir={tmp_path}/used"))


def test_an_output_dir_that_is_a_file_is_refused_with_its_key(claim, config, tmp_path) -> None:
    (tmp_path / "file").touch()
    for path, problem in (("file", "File exists"), ("file/run", "Not a directory")):
        with pytest.raises(ConfigError, match=f"output_dir: cannot write {tmp_path}/{path}: {problem}; expected"):
            claim(config(f"output_dir={tmp_path}/{path}"))


@pytest.mark.parametrize(
    "says, harm",
    {
        "is missing": Path.unlink,
        "is no text": lambda path: path.write_bytes(b"\xff"),
        "names 'step_0000004'": lambda path: path.write_text("step_0000004"),
    }.items(),
)
def test_the_newest_is_taken_whatever_latest_says_and_the_log_tells(find, config, saved, caplog, says, harm) -> None:
    harm(saved.path / "latest")
    with caplog.at_level(logging.WARNING):
        assert find(config()).step == 6
    assert caplog.text.count(f"{saved.path} holds checkpoints of steps 6, 4, 2; its file latest {says}") == 1


def test_a_file_in_the_place_of_the_newest_checkpoint_is_named(find, config, saved, caplog) -> None:
    path = saved.path / name_of(6)
    shutil.rmtree(path)
    path.touch()
    with caplog.at_level(logging.WARNING):
        assert find(config()).step == 4
    assert f"the checkpoint of step 6 cannot be used: {path}/{MANIFEST_FILE} cannot be read: Not a dir" in caplog.text
