"""Going on from a checkpoint in the nodes' memory: which ones they hold together, and what each node lacks of one."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rltrain.checkpoint.memory_files import Address, FetchedFile, FileServer, Source, fetch
from rltrain.checkpoint.node_memory import Key, NodeFolder, NodeMemory, offered, sources
from rltrain.checkpoint.run_files import RUN_FILE, FileRecord, find_damage, records_in
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError
from rltrain.observability.run_logs import ID_FILE, read_id
from rltrain.runtime.job_store import JobStore

logger = logging.getLogger(__name__)


class HeldCheckpoints:
    """What the nodes hold of a run as it begins again. All methods are collective over: all ranks."""

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
        """By node."""

    def refuse_without_room(self, num_bytes: int) -> None:
        """Where this node cannot hold checkpoints of so many bytes; see NodeFolder. CheckpointError."""
        if self.world.local_rank == 0:
            self._folder.refuse_without_room(num_bytes, restarted=self.world.restarted)

    def offers(self) -> list[Key]:
        """All that any node holds of the run whose logs are in output_dir, newest first; one may not be whole."""
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
        """The checkpoint, of which every node has the files that it had, and what it reads of the others once it does;
        or why it cannot be used, in words."""
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
            self._folder.replace(key.step, text)  # of another attempt at the step, which is not wanted any more
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
        """For what is saved from here on, once `leader` has opened the run's logs: what the run does not go on from is
        forgotten."""
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
        """Every node's server."""
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
        """By node, the intact files that it has, of which each rank reads its share."""
        good = self._intact(key.step, manifest) if key in self._manifests else []
        by_rank = self._of_ranks(f"{prefix}/good", good)
        per_node = self.world.ranks_per_node
        return [sum(by_rank[first : first + per_node], []) for first in range(0, self.world.size, per_node)]

    def _intact(self, step: int, manifest: Mapping[str, FileRecord]) -> list[str]:
        """This rank's share of the files that the node has, without those that are damaged."""
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
        """As the first rank of a node without run.json, which `node` has. What went wrong, in words."""
        if node is None or self.world.local_rank:
            return None
        self.job_store.heartbeat.begin(f"fetching {RUN_FILE} of {here.name} from another node's memory")
        return fetch(self.addresses[node], self._served(here, RUN_FILE), here / RUN_FILE, record, threading.Event())

    def _elsewhere(self, here: Path, name: str, node: int, record: FileRecord) -> Callable[[], FetchedFile]:
        source = Source(
            self.addresses[node], self._served(here, name), record.num_bytes, self.job_store.heartbeat.advance
        )
        return partial(FetchedFile, here / name, source)

    def _begin(self, files: Sequence[FetchedFile]) -> str | None:
        """Ask for their headers: so all nodes that have files are known to answer. What went wrong, in words."""
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
        """The name by which other nodes' servers know a file."""
        return f"{here.relative_to(self._folder.base)}/{name}"

    def _of_nodes(self, key: str, value: Any) -> list[Any]:
        """What the first rank of each node has given."""
        return self._gathered(key, value, range(0, self.world.size, self.world.ranks_per_node))

    def _of_ranks(self, key: str, value: Any) -> list[Any]:
        """What each rank has given."""
        return self._gathered(key, value, range(self.world.size))

    def _gathered(self, key: str, value: Any, ranks: range) -> list[Any]:
        """By way of rank 0: were each to ask for all the store would answer many times as often."""
        if self.world.rank in ranks:
            self.job_store.put(f"{key}/{self.world.rank}", value)
        if self.world.rank == 0:
            waiting = "what the other nodes hold in memory"
            self.job_store.put(key, [self.job_store.get(f"{key}/{rank}", waiting_for=waiting) for rank in ranks])
        found: list[Any] = self.job_store.get(key, waiting_for="rank 0 to tell what nodes hold in memory")
        return found
