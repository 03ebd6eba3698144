"""Resuming from a checkpoint on disk or in memory, and the folders of a run."""

import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial, reduce
from itertools import count
from pathlib import Path
from typing import Any

from rltrain.checkpoint.memory_files import Address, FetchedFile, FileServer, FileSource, fetch
from rltrain.checkpoint.node_memory import Key, NodeFolder, NodeMemory, offered, sources
from rltrain.checkpoint.run_files import (
    RUN_FILE,
    FileRecord,
    find_damage,
    read_contents,
    read_manifest,
    read_texts,
    records_in,
    set_random_states,
)
from rltrain.checkpoint.run_folder import LATEST_FILE, CheckpointFolder, Resumed, checkpoint_at
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError, ConfigError, ParityError, cannot_write
from rltrain.models import Architecture
from rltrain.observability.reporter import Reporter
from rltrain.observability.run_logs import (
    ID_FILE,
    LOGS,
    REWOUND,
    begin_logs,
    forget_steps,
    logs_in,
    read_id,
    sample_log_sizes,
    shorten,
)
from rltrain.roles.inputs import Inputs, data_changes, other_changes
from rltrain.roles.role import Job
from rltrain.roles.transfers import Transfers
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.placement import Placement
from rltrain.runtime.stopping import PAUSE
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import Order
from rltrain.schedule.replay import check
from rltrain.tasks.roles import trained_roles

logger = logging.getLogger(__name__)


# Resuming from the nodes' memory: the checkpoints held by all nodes together, and the missing files of each node.


class HeldCheckpoints:
    """The checkpoints of a run in its nodes' memory when it starts again. All methods are collective
    over: all ranks."""

    def __init__(self, config: Config, base: str, job_store: JobStore) -> None:
        self.config, self.base, self.job_store = config, base, job_store
        self.world = job_store.world
        self.node = self.world.rank // self.world.ranks_per_node
        self.addresses = self._open()
        if self.world.rank == 0:
            job_store.put("node_memory/run_id", read_id(self._id_file))
        self.run_id: str | None = job_store.get("node_memory/run_id", waiting_for="rank 0 to look for the run's logs")
        if self.world.local_rank == 0:
            self._folder.clear_abandoned()
            self._folder.claim()
        self._manifests: dict[Key, str] = {}
        self._offers: list[set[Key]] = []
        """The checkpoints offered by each node."""

    def refuse_without_room(self, num_bytes: int) -> None:
        """Raises CheckpointError if this node has no room for checkpoints of `num_bytes`. See NodeFolder."""
        if self.world.local_rank == 0:
            self._folder.refuse_without_room(num_bytes, restarted=self.world.restarted)

    def offers(self) -> list[Key]:
        """Returns the checkpoints that any node holds of the run with logs in output_dir, newest first. Some may be
        incomplete."""
        if self.run_id is None:
            return []
        self._manifests = self._folder.held()
        if self.world.local_rank == 0:
            self._folder.checkpoints.clear_partial()
            self._folder.drop_fetched()
        held = self._of_nodes("node_memory/held", [*self._manifests])
        self._offers = [{Key(*key) for key in of_node} for of_node in held]
        return offered(self._offers)

    def recover(self, key: Key) -> Resumed | str:
        """Returns the checkpoint, usable on every node, or a text with the reason why it is not.

        Each node keeps its intact files. Other files come from other nodes when they are read.
        """
        prefix = f"node_memory/{key.step}/{key.digest}"
        first = next(node for node, offers in enumerate(self._offers) if key in offers)
        if self.node == first and self.world.local_rank == 0:
            self.job_store.put(f"{prefix}/manifest", self._manifests[key])
        text: str = self.job_store.get(f"{prefix}/manifest", waiting_for=f"a manifest that node {first} has")
        manifest = records_in(text)
        held = self._held(key, manifest, prefix)
        found, missing = sources(manifest, held)
        if missing:
            return f"no node has an intact {missing[0]}" + (f", nor {len(missing) - 1} others" * (len(missing) > 1))
        if self.world.local_rank == 0 and key not in self._manifests:
            self._folder.replace(key.step, text)  # removes files of another attempt at the step
        per_node = self.world.ranks_per_node
        self.job_store.meet(f"{prefix}/there/{self.node}", per_node, waiting_for="a folder for a checkpoint in memory")
        here = self._folder.at(key.step)
        lacking = {name: found[name] for name in sorted(found.keys() - held[self.node])}
        problem = self._fetch_run(here, lacking.pop(RUN_FILE, None), manifest[RUN_FILE])
        elsewhere = {name: self._elsewhere(here, name, node, manifest[name]) for name, node in lacking.items()}
        mine = [*elsewhere.values()][self.world.local_rank :: per_node]
        problem = problem or self._begin([make() for make in mine])
        problems = filter(None, self._of_ranks(f"{prefix}/fetched", problem))
        return next(problems, None) or Resumed(here, key.step, in_memory=True, elsewhere=elsewhere)

    def begin(self, resumed: Resumed | None, leader: int) -> NodeMemory:
        """Returns the memory for new checkpoints, once `leader` has opened the run's logs. Deletes all checkpoints
        except `resumed`."""
        if self.world.local_rank == 0 and self.run_id is not None:
            self._folder.keep_only(resumed.step if resumed and resumed.in_memory else None)
        if self.world.rank == leader:
            self.job_store.put("node_memory/history", read_id(self._id_file))
        run_id = self.job_store.get("node_memory/history", waiting_for=f"rank {leader} to open the run's logs")
        if run_id != self.run_id and self.run_id is not None and self.world.local_rank == 0:
            self._folder.remove()
        folder = NodeFolder(self.base, run_id)
        folder.make()
        if self.world.local_rank == 0:
            folder.claim()
        return NodeMemory(folder, self.addresses)

    @property
    def _id_file(self) -> Path:
        return Path(self.config.output_dir, ID_FILE)

    @property
    def _folder(self) -> NodeFolder:
        return NodeFolder(self.base, str(self.run_id))

    def _open(self) -> list[Address]:
        """Starts a file server on each node and returns the addresses of all."""
        address: Address | None = None
        if self.world.local_rank == 0:
            base = NodeFolder(self.base, "").base
            try:
                base.mkdir(parents=True, exist_ok=True)
                address = FileServer(base, self.world.address).address
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint.memory.folder: {base} cannot be served to other nodes: {error.strerror or error}"
                ) from error
        return [Address(*found) for found in self._of_nodes("node_memory/server", address)]

    def _held(self, key: Key, manifest: Mapping[str, FileRecord], prefix: str) -> list[list[str]]:
        """Returns the intact files of each node. A node's ranks share the work of reading them."""
        good = self._intact(key.step, manifest) if key in self._manifests else []
        by_rank = self._of_ranks(f"{prefix}/good", good)
        per_node = self.world.ranks_per_node
        return [sum(by_rank[first : first + per_node], []) for first in range(0, self.world.size, per_node)]

    def _intact(self, step: int, manifest: Mapping[str, FileRecord]) -> list[str]:
        """Returns the intact files among this rank's share of the node's files. Deletes damaged ones."""
        heartbeat, here, good = self.job_store.heartbeat, self._folder.at(step), []
        heartbeat.begin(f"reading the checksums of {here.name} in memory")
        names = self._folder.files(step, manifest)
        for name in sorted(names)[self.world.local_rank :: self.world.ranks_per_node]:
            if damage := find_damage(here, manifest, [name], heartbeat.advance):
                logger.warning("%s", damage)
                (here / name).unlink(missing_ok=True)  # another node may have it
            else:
                good.append(name)
        return good

    def _fetch_run(self, here: Path, node: int | None, record: FileRecord) -> str | None:
        """Fetches run.json from `node`, on the first rank of a node without it. Returns the problem in
        words, or None."""
        if node is None or self.world.local_rank:
            return None
        self.job_store.heartbeat.begin(f"fetching {RUN_FILE} of {here.name} from another node's memory")
        return fetch(self.addresses[node], self._served(here, RUN_FILE), here / RUN_FILE, record, threading.Event())

    def _elsewhere(self, here: Path, name: str, node: int, record: FileRecord) -> Callable[[], FetchedFile]:
        source = FileSource(
            self.addresses[node], self._served(here, name), record.num_bytes, self.job_store.heartbeat.advance
        )
        return partial(FetchedFile, here / name, source)

    def _begin(self, files: Sequence[FetchedFile]) -> str | None:
        """Asks for the headers of the files, to learn whether the nodes with files answer. Returns the problem in
        words, or None."""
        if files:
            self.job_store.heartbeat.begin("fetching the headers of a checkpoint's files from other nodes' memory")
        try:
            for file in files:
                file.path.parent.mkdir(exist_ok=True)
                file.begin()
        except (CheckpointError, OSError) as error:
            return str(error)
        return None

    def _served(self, here: Path, name: str) -> str:
        """Returns the name of a file on the servers of other nodes."""
        return f"{here.relative_to(self._folder.base)}/{name}"

    def _of_nodes(self, key: str, value: Any) -> list[Any]:
        """Returns the values of each node's first rank."""
        return self._gathered(key, value, range(0, self.world.size, self.world.ranks_per_node))

    def _of_ranks(self, key: str, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        return self._gathered(key, value, range(self.world.size))

    def _gathered(self, key: str, value: Any, ranks: range) -> list[Any]:
        """Collects values through rank 0. If each rank asked for all values, the store would answer many times as
        often."""
        if self.world.rank in ranks:
            self.job_store.put(f"{key}/{self.world.rank}", value)
        if self.world.rank == 0:
            waiting = "what the other nodes hold in memory"
            self.job_store.put(key, [self.job_store.get(f"{key}/{rank}", waiting_for=waiting) for rank in ranks])
        found: list[Any] = self.job_store.get(key, waiting_for="rank 0 to publish the checkpoints in nodes' memory")
        return found


# The folders of a run. One job at a time writes to them, and files of an earlier run are moved away.

LOCK_FILE = "lock"
WAIT_S = 20.0
"""Seconds to wait for a killed job to end, so the next one can have its folder."""
POLL_S = 0.2
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

_held: dict[Path, int] = {}
"""Locked folder -> descriptor of its lock, for the life of this process. The kernel frees the lock at any
kind of end."""


def lock_folder(
    folder: Path, config_key: str, *, wait_s: float = WAIT_S, advance: Callable[[], None] = lambda: None
) -> None:
    """Locks `folder` against other jobs until this process ends. Creates the folder if it does not exist.

    Waits up to `wait_s` seconds for a job with the lock, and calls `advance` meanwhile. Raises ConfigError with
    `config_key` and the other job if the lock is still taken, or if the folder cannot be written. On a file system
    without locks it only logs a warning.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() in _held:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cannot_write(folder, error, config_key, config_key) from error
    try:
        _wait_for_lock(descriptor, path, config_key, wait_s, advance)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_holder()).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise cannot_write(path, error, config_key, config_key) from error
    except ConfigError:
        os.close(descriptor)
        raise
    _held[folder.resolve()] = descriptor


def set_aside(paths: Sequence[Path], config_key: str, *, keep: bool = False, into: Path | None = None) -> Path:
    """Moves `paths` from one folder into a new folder in it, or into `into`. Returns the new folder.

    `keep` copies them instead. Raises ConfigError if a file cannot be written.
    """
    parent = paths[0].parent
    folder = into or next(place for i in count(1) if not os.path.lexists(place := parent / f"earlier_{i}"))
    try:
        folder.mkdir(exist_ok=into is not None)
        for path in paths:
            target = folder / path.name
            if not keep:
                path.rename(target)
            elif path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copy2(path, target)
    except OSError as error:
        raise cannot_write(folder, error, config_key, config_key) from error
    return folder


def _wait_for_lock(descriptor: int, path: Path, config_key: str, wait_s: float, advance: Callable[[], None]) -> None:
    deadline, told = time.monotonic() + wait_s, False
    while not _try_to_lock(descriptor, path):
        holder = _holder(path)
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{config_key}: {path.parent} is in use by another job ({holder}), whose files would mix with those of "
                "this one; wait for its end, or name another folder"
            )
        if not told:
            logger.warning(
                "%s: %s is in use by another job (%s); waiting %g s for its end",
                *(config_key, path.parent, holder, wait_s),
            )
            told = True
        advance()
        time.sleep(min(POLL_S, wait_s))


def _try_to_lock(descriptor: int, path: Path) -> bool:
    """Returns False if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s cannot be locked (%s): nothing keeps a second job from writing there too", path.parent, error.strerror
        )
    return True


def _this_holder() -> dict[str, str | int]:
    return {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _holder(path: Path) -> str:
    """Returns the holder named in the lock file, in words."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} does not say which"


# Resuming: the choice of a checkpoint, its check against the config, and the remaining order.

FIXED_KEYS = ("algorithm", "seed", "batch.prompts_per_step", "data.shuffle")
"""Keys that a resumed run must not change. With the training rows, they determine the stream of prompts."""
LEARNT_BY = ("actor.optimizer", "critic.optimizer", "loss", "advantages", "preference", "batch", "rollout.sampling")
"""Sections that a resumed run may change. Each change is logged."""
DRAWN_BY = ("schedule", "batch.samples_per_prompt")
"""If one of these has changed, responses generated ahead do not fit the coming steps."""


def find_checkpoint(config: Config, job_store: JobStore, held: HeldCheckpoints | None = None) -> Resumed | None:
    """Returns the newest intact checkpoint that the config allows, or None if the run starts at its first step.

    Of two checkpoints of one step it takes the one in the nodes' memory. Every rank compares checksums of its share of
    the files. Raises CheckpointError if the checkpoint named by the config is missing or damaged, or if none is intact.
    Collective over: all ranks.
    """
    world = job_store.world
    if world.rank == 0:
        found = _candidates(config, world.restarted)
        job_store.put("resume/candidates", [(str(checkpoint.folder), checkpoint.step) for checkpoint in found])
        job_store.put("resume/from_memory", config.checkpoint.resume == "auto" or world.restarted)
    candidates = job_store.get("resume/candidates", waiting_for="the checkpoints that rank 0 has found")
    on_disk = [Resumed(Path(folder), step) for folder, step in candidates]
    from_memory = held and job_store.get("resume/from_memory", waiting_for="rank 0 to look for checkpoints")
    in_memory = held.offers() if held and from_memory else []
    if held and from_memory and not in_memory and on_disk and world.rank == 0:
        logger.warning("no node holds a checkpoint of the run in its memory: trying those on disk")
    tried: list[Resumed | Key] = sorted([*in_memory, *on_disk], key=lambda checkpoint: -checkpoint.step)
    for number, candidate in enumerate(tried):
        if isinstance(candidate, Resumed):
            found_here: Resumed | str = _damage(candidate, job_store, f"resume/{number}") or candidate
        else:
            assert held is not None, "a node's memory offered it"
            found_here = held.recover(candidate)
        if isinstance(found_here, Resumed):
            if world.rank == 0:
                _say_where_it_goes_on(config, found_here)
            return found_here
        if isinstance(candidate, Resumed) and candidate.folder.is_relative_to(config.checkpoint.resume):
            raise CheckpointError(f"checkpoint.resume: {found_here}")  # the config names this one
        if world.rank == 0:
            where = "" if isinstance(candidate, Resumed) else " in memory"
            logger.warning("the checkpoint of step %d%s cannot be used: %s", candidate.step, where, found_here)
    if candidates:
        raise CheckpointError(
            f"checkpoint.resume: none of the {len(candidates)} checkpoints in {config.checkpoint_dir} is intact; name "
            "another one, or start a new run with another checkpoint.dir"
        )
    return None


def _say_where_it_goes_on(config: Config, checkpoint: Resumed) -> None:
    memory = ", in the nodes' memory" if checkpoint.in_memory else ""
    logger.warning("resuming after step %d, from %s%s", checkpoint.step, checkpoint.folder, memory)
    if checkpoint.step == config.steps:
        logger.warning(
            "the run in %s is finished: all of its %d steps are done, and only the work after the last one is "
            "repeated. To train further, set more steps (steps=%d); to start another run, set another output_dir",
            *(config.output_dir, config.steps, 2 * config.steps),
        )


def _candidates(config: Config, restarted: bool) -> list[Resumed]:
    """Returns checkpoints on disk in the order to try them. Called on one rank, before anything is written."""
    folder, resume = CheckpointFolder(Path(config.checkpoint_dir)), config.checkpoint.resume
    own = folder.candidates()
    if own and (latest := folder.latest()) != f"names '{own[0].folder.name}'":
        steps = ", ".join(str(checkpoint.step) for checkpoint in own)
        logger.warning("%s holds checkpoints of steps %s; its file %s %s", folder.path, steps, LATEST_FILE, latest)
    if config.checkpoint.saves:
        folder.clear_partial()
    if resume == "auto" or (restarted and own):
        return own
    if resume != "none":
        return [checkpoint_at(Path(resume))]
    if own and config.checkpoint.saves:
        raise CheckpointError(
            f"checkpoint.resume: none, but {folder.path} holds checkpoints, the newest of step {own[0].step}; expected "
            "a checkpoint.dir without any, or checkpoint.resume: auto to resume from it"
        )
    return []


def _damage(checkpoint: Resumed, job_store: JobStore, key: str) -> str | None:
    """Returns the first damage found by any rank, or None. Collective over: all ranks."""
    world, heartbeat = job_store.world, job_store.heartbeat
    heartbeat.begin(f"reading the checksums of {checkpoint.folder.name}")
    try:
        manifest = read_manifest(checkpoint.folder)
        mine = find_damage(checkpoint.folder, manifest, sorted(manifest)[world.rank :: world.size], heartbeat.advance)
    except CheckpointError as error:
        mine = str(error)
    job_store.put(f"{key}/{world.rank}", mine)
    if world.rank == 0:
        waiting = f"the checksums of {checkpoint.folder}"
        found = [job_store.get(f"{key}/{rank}", waiting_for=waiting) for rank in range(world.size)]
        job_store.put(f"{key}/verdict", next(filter(None, found), None))
    verdict: str | None = job_store.get(f"{key}/verdict", waiting_for="the verdict of rank 0 on the checkpoint")
    return verdict


def check_resumed(
    config: Config, architectures: Mapping[str, Architecture], checkpoint: Resumed, *, restarted: bool = False
) -> None:
    """Checks that a checkpoint fits the config and the models.

    Raises CheckpointError with both values of every difference. Raises ParityError if the run is paused and torchrun
    has `restarted` it. A user has to start it again.
    """
    run = checkpoint.run
    problems = [*_config_problems(config, run["config"]), *_architecture_problems(architectures, run["architectures"])]
    if checkpoint.step > config.steps:
        problems.append(f"steps is {config.steps}, but it was saved after step {checkpoint.step}")
    if restarted and str(run.get("stopped_by") or "").startswith(PAUSE):
        raise ParityError(
            f"the run is paused after step {checkpoint.step} ({checkpoint.folder}), and torchrun has restarted it: "
            "after a pause (checks.action) a user has to decide. Change the config as needed and start the job again"
        )
    if problems:
        raise CheckpointError(
            f"checkpoint.resume: {checkpoint.folder} does not fit this config: {'; '.join(problems)}. Use the "
            "saved values, or start a new run with another checkpoint.dir. To start it from these weights: "
            f"rltrain convert run-to-hf --input {checkpoint.folder} --output DIR, and model.path: DIR"
        )


def with_present_inputs(config: Config, checkpoint: Resumed, inputs: Inputs, *, says: bool = True) -> Resumed:
    """Returns `checkpoint` with `data_from`, the step that takes the first training row.

    That is the next step if the rows have changed since the checkpoint was saved. Logs a line for each change if `says`
    is set. Raises CheckpointError if `data.on_change` refuses changes.
    """
    run = checkpoint.run
    before = run.get("inputs")
    of_data = [*data_changes(before, inputs)] if before else []
    others = [*other_changes(before, inputs)] if before else []
    if config.data.on_change == "refuse" and (of_data or others):
        raise CheckpointError(
            f"data.on_change: refuse, and inputs have changed since {checkpoint.folder} was saved: "
            f"{'; '.join([*of_data, *others])}. Use the saved inputs, or set data.on_change: restart to continue with "
            "the present ones, beginning at the first of the new rows"
        )
    for change in of_data if says else ():
        logger.warning("%s: step %d takes the first of these rows", change, checkpoint.step)
    for change in [*others, *_setting_changes(run["config"], config)] if says else ():
        logger.warning("%s", change)
    return replace(checkpoint, data_from=checkpoint.step if of_data else run.get("data_from", 0))


def _setting_changes(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yields a line for each setting of LEARNT_BY that has changed since the checkpoint was saved."""
    now = config.model_dump(mode="json")
    for section in LEARNT_BY:
        before, here = (dict(_leaves(reduce(_part, section.split("."), whole))) for whole in (saved, now))
        for key in sorted(before.keys() | here.keys()):
            if before.get(key) != here.get(key):
                yield f"{section}.{key} was {before.get(key)}, and is {here.get(key)}"


def _part(section: Any, name: str) -> Any:
    return section.get(name) or {}


def _leaves(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _config_problems(config: Config, saved: Mapping[str, Any]) -> Iterator[str]:
    for key in FIXED_KEYS:
        before, here = _values(key, saved, config)
        if before != here:
            yield f"{key} is {here}, but it was saved with {before}"


def _values(key: str, saved: Mapping[str, Any], config: Config) -> Iterator[Any]:
    """Yields the saved value of a dotted key, then the present one."""
    for values in (saved, config.model_dump(mode="json")):
        yield reduce(lambda section, name: section[name], key.split("."), values)


def _architecture_problems(architectures: Mapping[str, Architecture], saved: Mapping[str, Any]) -> Iterator[str]:
    for role in trained_roles():
        if role not in architectures or role not in saved:
            continue
        now = json.loads(json.dumps(asdict(architectures[role])))
        # A field unknown to the version that saved had its default value.
        before = {field.name: field.default for field in fields(Architecture)} | saved[role]
        for name in now:
            if name != "eos_token_ids" and now[name] != before[name]:
                yield f"{name} of the {role}'s model is {now[name]}, but it was saved with {before[name]}"


def remaining_order(config: Config, placement: Placement, checkpoint: Resumed) -> tuple[Order, bool]:
    """Returns the remaining order, and whether it uses the responses and experience in the checkpoint.

    It does not if the schedule, the number of samples or the training rows have changed, or if the run had ended. Then
    responses of later steps are generated again. Raises ConfigError if the remaining order cannot finish.
    """
    order, continues = _rest(config, placement, checkpoint)
    check(order.excerpt(), placement)
    return order, continues


def _rest(config: Config, placement: Placement, checkpoint: Resumed) -> tuple[Order, bool]:
    run, step = checkpoint.run, checkpoint.step
    whole = build_order(config, placement)
    rest = whole.from_step(step)
    crossing = [list(entry.transfer) for entry in whole.crossing(whole.boundary(step)).values()]
    fits = all(before == here for before, here in (_values(key, run["config"], config) for key in DRAWN_BY))
    if crossing == run["crossing"] and fits and not checkpoint.has_new_data:
        return rest, True
    return build_order(config, placement, first_step=step), False


def claim_folders(config: Config, leader: int, job_store: JobStore) -> dict[str, tuple[str, str]]:
    """Locks the job's folders on `leader`, before any rank writes to them. Returns (lock file, its content) by config
    key.

    Raises ConfigError on `leader` if another job has a folder. Collective over: all ranks.
    """
    if job_store.world.rank == leader:
        job_store.heartbeat.begin("locking its folders")
        folders = {"output_dir": Path(config.output_dir)}
        if config.checkpoint.saves:
            folders["checkpoint.dir"] = Path(config.checkpoint_dir)
        for key, folder in folders.items():
            lock_folder(folder, key, advance=job_store.heartbeat.advance)
        locks = {key: folder / LOCK_FILE for key, folder in folders.items()}
        job_store.put("folders/claimed", {key: (str(path), path.read_text()) for key, path in locks.items()})
    claimed = job_store.get("folders/claimed", waiting_for=f"rank {leader} to lock output_dir")
    return {key: (path, text) for key, (path, text) in claimed.items()}


def open_history(config: Config, checkpoint: Resumed | None) -> dict[str, int]:
    """Cuts the logs and checkpoints in the run's folders at `checkpoint`. Returns the remaining sizes of the sample
    logs.

    If the run resumes from its own checkpoint, later log entries are removed, because they come again. If its folder
    has checkpoints of later steps, the run was sent back. They are moved to a subfolder, with a copy of the logs. Files
    of another run, or from before a new start (None), are all moved to a subfolder. Called on one rank, before any rank
    writes. Raises ConfigError if a file cannot be written.
    """
    output_dir = Path(config.output_dir)
    history = read_id(output_dir / ID_FILE)
    goes_on, later = False, list[Path]()
    if checkpoint is not None:
        own = CheckpointFolder(Path(config.checkpoint_dir))
        is_own = checkpoint.in_memory or checkpoint.folder.parent.resolve() == own.path.resolve()
        goes_on = is_own and history is not None and checkpoint.run.get("history") == history
        later = [found.folder for found in own.candidates() if not is_own or found.step > checkpoint.step]
    if later and (goes_on or config.checkpoint.saves):
        names = ", ".join(path.name for path in later)
        logger.warning("%s: moved to %s, the run continues without them", names, set_aside(later, "checkpoint.dir"))
    if checkpoint is None or history is None or not goes_on:
        _set_earlier_run_aside(config, output_dir)
        begin_logs(output_dir)
        return {}
    if later and (logs := logs_in(output_dir, REWOUND)):
        logger.warning("a copy of the logs with these steps is in %s", set_aside(logs, "output_dir", keep=True))
    forget_steps(output_dir, checkpoint.step)
    saved = [json.loads(texts["logs"]) for texts in map(read_texts, checkpoint.files("ranks"))]
    written = sample_log_sizes(output_dir)
    shorten(output_dir, {name: max(sizes.get(name, 0) for sizes in saved) for name in written})
    return sample_log_sizes(output_dir)


def _set_earlier_run_aside(config: Config, output_dir: Path) -> None:
    """Moves all files of an earlier run to a subfolder, so this run replaces none of them.

    Files that this run reads are copied instead.
    """
    if not (left := logs_in(output_dir, LOGS)):
        return
    named = [Path(text).resolve() for text in _texts_in(config.model_dump()) if "\0" not in text]
    read = [path for path in left if any(name.is_relative_to(path.resolve()) for name in named)]
    moved = [path for path in left if path not in read]
    folder = set_aside(moved, "output_dir") if moved else None
    if read:
        folder = set_aside(read, "output_dir", keep=True, into=folder)
    logger.warning("the logs and exported models of an earlier run are now in %s", folder)


def _texts_in(value: object) -> Iterator[str]:
    """Yields every text of a config, because any of them may name a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts_in(part)


def restore(job: Job, transfers: Transfers, reporter: Reporter) -> None:
    """Restores this rank's state outside of its roles: crossing experience, unfinished metrics and random states."""
    if job.resumed is None:
        return
    if job.resumed.continues:
        transfers.restore([contents.tensors for contents in map(read_contents, job.resumed.files("transfers"))])
    for file in job.resumed.files("ranks"):
        if job.world.rank == job.leader:
            metrics = json.loads(read_texts(file)["metrics"])
            reporter.adopt({int(step): values for step, values in metrics.items()})
        if file.path.stem == f"rank_{job.world.rank:05d}":
            contents = read_contents(file)
            set_random_states(contents.tensors, contents.metadata["random"], job.world.device)
