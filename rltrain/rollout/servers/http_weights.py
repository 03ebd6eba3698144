"""New weights for servers at URLs: the common interface, and the ways of delivery.

Weights are broadcasts over a process group, whole checkpoints in a folder on shared storage, or files of changes there.
"""

import asyncio
import logging
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA, HfFile, copy_carried_files, planned_files, write_config, write_index
from rltrain.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from rltrain.config.schema import WeightDelta
from rltrain.errors import ConfigError, cannot_write
from rltrain.models.table import ElementType
from rltrain.reshard.changes import changes_on
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.delta import DeltaTurn, DeltaTurns
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.rollout.delta_form import encoded, form, write_changes
from rltrain.rollout.servers.calls import Calls, ServerBusy, ServerGone, ServerRefuses, words
from rltrain.rollout.servers.protocols import Receiver, ServerProtocol
from rltrain.rollout.servers.update_groups import Broadcasts, UpdateGroup
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import JobThread
from rltrain.runtime.whole_files import make_empty, put_in_place

# The interface for all ways of delivery.


class Weights(ABC):
    """This rank's share of the weights for its servers.

    An update is `begin`, then `tensors` and `arrived` for every part in order, then `complete`. Afterwards `give` can
    deliver the weights to any server, any number of times. `open` follows `begin`, and `pass_on` follows every
    `arrived`.

    `open`, `pass_on`, `give` and `forget` run in the event loop; the others run in the rank's main thread. Servers
    receive nothing before `complete`, unless `pass_on` sends parts earlier.
    """

    way: str
    """One of a protocol's `ways`."""
    label: str | None = None
    """Label of the weights delivered by `give`, unique among all jobs. None before the first update."""

    def refusal(self, protocol: ServerProtocol) -> str | None:
        """Returns the reason if this rank cannot deliver weights to servers of `protocol`, else None."""
        return None

    def begin(self) -> None:
        """Begins an update."""
        return

    @abstractmethod
    def tensors(self, part: int) -> Mapping[str, Tensor]:
        """Returns the tensors to write the part's parameters to, by name."""

    @abstractmethod
    def arrived(self, part: int) -> None:
        """Marks `tensors(part)` as written."""

    @abstractmethod
    def complete(self, version: int) -> None:
        """Ends an update after its last part. Collective over: all ranks of the role."""

    async def open(self, receivers: Sequence[Receiver]) -> None:
        """Prepares these servers for the update. A failure is raised later by `give` for the same server."""
        return

    async def pass_on(self) -> None:
        """Sends the part that arrived."""
        return

    @abstractmethod
    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """Delivers the weights to a server and returns once it has taken them.

        Raises as `Calls` does, and WeightsLater if the server must wait for the next update.
        """

    async def forget(self, calls: Calls) -> None:
        """Frees the resources of a server that is gone or has left."""
        return

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last update."""
        return {}

    def close(self) -> None:
        """Frees all resources. Must be called after the last `give`."""
        return


class WeightsLater(Exception):  # noqa: N818 - names what happens
    """A server must wait for the next update, because the last one is not kept."""


def shared_run(job_store: JobStore, role: str, *, leads: bool) -> str:
    """Returns the common prefix of the labels of this run's weights. The rank with `leads` chooses it."""
    key = f"http/{role}/run"
    if leads:
        job_store.put(key, secrets.token_hex(4))
    return str(job_store.get(key, waiting_for=f"the labels of role {role}'s weights"))


def entries_of(part: Layout, rank: int) -> list[TensorEntry]:
    """Returns the entries of the parameters of `part` on a rank."""
    types: Sequence[int] = parameter_types(part, part.parts[part.ranks.index(rank)]).tolist()
    return [
        TensorEntry(name, DTYPES[ElementType(kind)], tuple(shape))
        for (name, shape), kind in zip(part.on(rank).parameters, types, strict=True)
    ]


def empty_tensors(part: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Returns uninitialized tensors for the parameters of `part` on a rank, by name."""
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry in entries_of(part, rank)}


# Weights by broadcasts, part by part. This rank has one process group with each of its servers.

T = TypeVar("T")
Problem = ServerGone | ServerRefuses | ServerBusy
CLOSE_S = 5.0
"""Time for each group to close before the process ends."""


@dataclass(frozen=True)
class _Part:
    """A part of the weights. `flat` holds the bytes of all `entries` one after another."""

    number: int
    flat: Tensor
    entries: Sequence[TensorEntry]


@dataclass(frozen=True)
class _Joined:
    group: UpdateGroup
    way: Broadcasts


class GroupWeights(Weights):
    """Weights by broadcasts. Every rank of the role receives all tensors whole, in `parts`.

    A rank holds two parts at a time: one is written while the other is broadcast. Nothing is kept after an update. So a
    server that joins between updates waits for the next one, and a server lost during an update misses the rest of it.
    Each server has its own group, so a lost server does not break the groups of others.

    `run` is the prefix of labels, equal on all ranks of the role. Waits last at most `update_timeout_s` per part.
    """

    way = "group"

    def __init__(
        self, parts: Sequence[Layout], rank: int, *, device: torch.device, run: str, update_timeout_s: float
    ) -> None:
        self._parts, self._rank, self._device, self._run = parts, rank, device, run
        self._limit_s = update_timeout_s
        self._written: _Part | None = None
        self._sending: asyncio.Task[None] | None = None
        self._groups: dict[str, _Joined] = {}
        """Groups by the URL of their server. The next two are by URL too."""
        self._receivers: dict[str, Receiver] = {}
        """Servers of the update under way, without the failed ones."""
        self._problems: dict[str, Problem] = {}
        self._closing: list[JobThread] = []
        """Threads that close groups."""

    def refusal(self, protocol: ServerProtocol) -> str | None:
        return protocol.broadcasts.refusal(self._device) if protocol.broadcasts is not None else None

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        # Wide elements come first, so all tensors are aligned.
        entries = sorted(entries_of(self._parts[part], self._rank), key=lambda entry: -entry.dtype.itemsize)
        flat = torch.empty(sum(entry.bytes for entry in entries), dtype=torch.uint8, device=self._device)
        self._written = _Part(part, flat, entries)
        pieces = zip(entries, flat.split([entry.bytes for entry in entries]), strict=True)
        return {entry.name: piece.view(entry.dtype).view(entry.shape) for entry, piece in pieces}

    def arrived(self, part: int) -> None:
        """Does nothing, because `pass_on` sends the part."""

    def complete(self, version: int) -> None:
        self.label = f"{self._run}.{version}"

    async def open(self, receivers: Sequence[Receiver]) -> None:
        self._problems = {}
        self._receivers = {receiver.calls.url: receiver for receiver in receivers}
        await self._by_all(self._open, "the beginning of an update")

    async def pass_on(self) -> None:
        await self._sent()
        part, self._written = self._written, None
        if part is not None and part.entries:
            what = f"part {part.number + 1} of {len(self._parts)} of the weights"
            sending = self._by_all(lambda receiver: self._send(receiver, part), what)
            self._sending = asyncio.get_running_loop().create_task(sending)

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None, "an update is complete"
        await self._sent()
        if (problem := self._problems.pop(calls.url, None)) is not None:
            raise problem
        if (receiver := self._receivers.pop(calls.url, None)) is None:
            await self.forget(calls)
            raise WeightsLater(f"{calls.url} has come between two updates: it gets weights with the next one")
        await self._limited(_way(receiver).end(calls, self.label, self._limit_s), calls, "the end of an update")

    async def forget(self, calls: Calls) -> None:
        if (joined := self._groups.get(calls.url)) is not None:
            with suppress(ServerGone, ServerRefuses, ServerBusy):  # a server that is gone has left its group
                await joined.way.leave(calls, joined.group.name)
            self._drop(calls.url)

    def close(self) -> None:
        for url in [*self._groups]:
            self._drop(url)
        for closing in self._closing:
            closing.join(CLOSE_S)  # the process may end, and torch would abort it in the middle of this

    def _drop(self, url: str) -> None:
        """Closes this rank's end of a group in another thread, because a broadcast may be running."""
        if (joined := self._groups.pop(url, None)) is not None:
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(JobThread(target=joined.group.close, name="update group", daemon=True))
            self._closing[-1].start()

    async def _by_all(self, act: Callable[[Receiver], Awaitable[None]], what: str) -> None:
        """Calls `act` for all servers of the update. A server that fails is left out of the rest."""

        async def tried(receiver: Receiver) -> None:
            url = receiver.calls.url
            try:
                await self._limited(act(receiver), receiver.calls, what)
            except (ServerGone, ServerRefuses, ServerBusy) as problem:
                self._problems[url] = problem
                del self._receivers[url]
                self._drop(url)

        await asyncio.gather(*map(tried, [*self._receivers.values()]))

    async def _open(self, receiver: Receiver) -> None:
        calls = receiver.calls
        if await receiver.protocol.version(calls) != self.label:
            await self.forget(calls)  # a restarted server has no group
        if calls.url not in self._groups:
            await self._join(receiver)
        await _way(receiver).begin(calls, self._limit_s)

    async def _join(self, receiver: Receiver) -> None:
        calls, num_ranks = receiver.calls, (await receiver.protocol.describe(receiver.calls)).num_ranks
        assert num_ranks is not None, "other servers are refused"
        peer = urlsplit(calls.url).hostname or ""
        way = _way(receiver)
        group = await _beside(lambda: way.group(peer, num_ranks, self._device, self._limit_s))
        self._groups[calls.url] = _Joined(group, way)
        await _both(way.join(calls, group, self._limit_s), group.join)

    async def _send(self, receiver: Receiver, part: _Part) -> None:
        calls, group = receiver.calls, self._groups[receiver.calls.url].group
        asked = _way(receiver).receive(calls, group.name, part.entries, self._limit_s)
        await _both(asked, lambda: group.broadcast(part.flat))

    async def _sent(self) -> None:
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _limited(self, work: Awaitable[None], calls: Calls, what: str) -> None:
        try:
            await asyncio.wait_for(work, self._limit_s)
        except TimeoutError:
            raise ServerGone(f"{calls.url}: {what}: not done within {self._limit_s:g} s") from None
        except (RuntimeError, OSError) as error:  # from the process group
            raise ServerGone(f"{calls.url}: {what}: {words(error)}") from error


def _way(receiver: Receiver) -> Broadcasts:
    assert receiver.protocol.broadcasts is not None, "other servers are refused"
    return receiver.protocol.broadcasts


async def _both(asked: Coroutine[Any, Any, None], here: Callable[[], None]) -> None:
    """Waits for the call to a server and for this rank's part `here`. If one fails, does not wait for the other. If
    both fail, raises the server's error."""
    both = [asyncio.ensure_future(asked), _beside(here)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for one in both:
            if one.done():
                one.result()
    finally:
        both[0].cancel()


def _beside(call: Callable[[], T]) -> "asyncio.Future[T]":
    """Runs the blocking `call` in a daemon thread, so that the process can end without it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - the waiting caller raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    JobThread(target=work, name="update group", daemon=True).start()
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda one: one.cancelled() or one.exception())  # retrieves it
    return waiting


# Folders on shared storage, written by all ranks of a role together. A folder appears complete or not at all.

PARTIAL = ".rltrain_{}.partial"


class SharedFolders:
    """Temporary and complete folders inside `folder`. Messages name it by `config_key`.

    The first of `ranks` creates, renames and removes them. At the start it removes the folders of an earlier run, known
    by `patterns` of their names. `begin` and `complete` are collective over: `ranks`.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        rank: int,
        *,
        job_store: JobStore,
        key: str,
        config_key: str,
        patterns: Sequence[str],
    ) -> None:
        self.leads = rank == ranks[0]
        self._folder, self._ranks, self._rank = folder.absolute(), ranks, rank
        self._job_store, self._key, self._config_key, self._patterns = job_store, key, config_key, patterns
        self._number = 0
        if self.leads:
            self._clear()

    def begin(self) -> Path:
        """Returns a new temporary folder. No server reads it."""
        self._number += 1
        partial, made = self._partial, f"{self._key}/{self._number}/made"
        if self.leads:
            self.writing(partial, lambda: make_empty(partial))
            self._forget(self._number - 2)
            self._job_store.put(made, True)
        self._job_store.get(made, waiting_for=f"the folder {partial}")
        return partial

    def complete(self, name: str, wrote: Any, finish: Callable[[Path, list[Any]], None]) -> tuple[Path, list[Any]]:
        """Renames the temporary folder to `name` once every rank has written its share.

        `wrote` is this rank's JSON value. `finish` is called before on the first rank, with the temporary folder and
        the values of all ranks. Returns the final path and these values, in the order of ranks.
        """
        key = f"{self._key}/{self._number}"
        path, partial = self._folder / name, self._partial
        self._job_store.put(f"{key}/written/{self._rank}", wrote)
        if self.leads:
            all_wrote = [
                self._job_store.get(f"{key}/written/{rank}", waiting_for=f"the weights that rank {rank} writes")
                for rank in self._ranks
            ]
            self.writing(path, lambda: finish(partial, all_wrote))
            self.writing(path, lambda: put_in_place(partial, path, replaces=True))
            self._job_store.put(f"{key}/complete", all_wrote)
        return path, self._job_store.get(f"{key}/complete", waiting_for=f"the folder {path}")

    def remove(self, paths: Sequence[Path]) -> None:
        """Removes folders that servers do not need any more."""
        for path in paths if self.leads else ():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        if self.leads:
            self._clear()

    def writing(self, path: Path, write: Callable[[], T]) -> T:
        """Returns the result of `write`. Raises ConfigError with the config key if `path` cannot be written."""
        try:
            return write()
        except OSError as error:
            raise cannot_write(path, error, self._config_key, self._config_key) from error

    @property
    def _partial(self) -> Path:
        return self._folder / PARTIAL.format(self._number)

    def _forget(self, update: int) -> None:
        """Deletes the store's entries of an earlier update. All ranks must have left it."""
        if update > 0:
            for told in ("made", "complete", *(f"written/{rank}" for rank in self._ranks)):
                self._job_store.forget(f"{self._key}/{update}/{told}")

    def _clear(self) -> None:
        """Removes this class's folders, and then `folder` if it is empty."""
        if not self._folder.exists():
            return
        if not self._folder.is_dir():
            raise ConfigError(f"{self._config_key}: {self._folder} is not a folder; expected a folder or a new path")
        for pattern in (*self._patterns, PARTIAL):
            for path in self._folder.glob(pattern.format("*")):
                shutil.rmtree(path, ignore_errors=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


# Weights as a checkpoint in a shared folder. Ranks write it together and servers load it.

FOLDER, DELTA_FOLDER = "version_{}", "delta_{}"


class DiskWeights(Weights):
    """Weights as checkpoints in a folder. The previous version stays until the next one is complete, so a joining
    server always finds one. Folders of an earlier run are removed.

    - `whole` is the layout of all tensors on the ranks of the role, from reshard.layout.hf_layout. `parts` divide it
      into parts of at most `max_bytes`, one file each.
    - `like` is the checkpoint folder whose config and tokenizer are copied.
    - `config_key` is the key that sets `folder`, for messages.
    """

    way = "folder"

    def __init__(
        self,
        whole: Layout,
        parts: Sequence[Layout],
        max_bytes: int,
        rank: int,
        *,
        device: torch.device,
        folder: Path,
        like: Path,
        job_store: JobStore,
        role: str,
        config_key: str,
        update_timeout_s: float,
    ) -> None:
        self.path: Path | None = None
        """The last complete checkpoint."""
        self.partial = Path()
        """The temporary folder of the update under way."""
        self.held: dict[str, Tensor] = {}
        """The part being written."""
        self.num_bytes = 0
        """Bytes of tensors in all files of the last update, over all ranks."""
        self.rank, self.device, self.update_timeout_s = rank, device, update_timeout_s
        self._parts, self._like = parts, like
        self._files = planned_files(whole, max_bytes)
        self._mine = [file for file in self._files if file.writer == rank]
        self.folders = SharedFolders(
            folder,
            whole.ranks,
            rank,
            job_store=job_store,
            key=f"http/{role}/weights",
            config_key=config_key,
            patterns=(FOLDER, DELTA_FOLDER),
        )
        self._run = shared_run(job_store, role, leads=self.folders.leads)

    def label_of(self, version: int) -> str:
        """Returns the label of a version, unique among all jobs."""
        return f"{self._run}.{version}"

    def begin(self) -> None:
        self.partial = self.folders.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        self.held = empty_tensors(self._parts[part], self.rank, self.device)
        return self.held

    def arrived(self, part: int) -> None:
        """Writes the part's tensors durably."""
        if part < len(self._mine):
            self._write(self._mine[part])
        self.held = {}

    def complete(self, version: int) -> None:
        """Completes the checkpoint and removes the one before. No rank has servers load that one during an update."""
        old, label = self.path, self.label_of(version)
        wrote = sum(entry.bytes for file in self._mine for entry in file.entries)
        self.path, all_wrote = self.folders.complete(
            FOLDER.format(version), wrote, lambda partial, _: self._finish(partial, label)
        )
        if old is not None and old != self.path:
            self.folders.remove([old])
        self.num_bytes, self.label = sum(all_wrote), label

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.path is not None and self.label is not None, "an update is complete"
        await protocol.load_from_disk(calls, str(self.path), self.label, self.update_timeout_s)

    def metrics(self) -> dict[str, float]:
        return {"rollout/weight_files_bytes": float(self.num_bytes)}

    def close(self) -> None:
        self.folders.close()

    def _write(self, file: HfFile) -> None:
        path = self.partial / file.name

        def write() -> None:
            with SafetensorsFile(path, file.entries, METADATA) as opened:
                for entry in opened.entries:
                    opened.append(entry.name, self.held[entry.name])

        self.folders.writing(path, write)

    def _finish(self, partial: Path, label: str) -> None:
        """Writes the index, config, tokenizer and version files."""
        dtype = str(self._files[0].entries[0].dtype).removeprefix("torch.")
        write_index(partial, self._files)
        write_config(self._like, partial, dtype)
        copy_carried_files(self._like, partial)
        (partial / form.VERSION_FILE).write_text(form.version_text(label))


# Weights as files of changes, with a whole checkpoint from time to time.

logger = logging.getLogger(__name__)

FILE = "changes-{:05d}-{:05d}.delta"
"""File name by rank and part. Servers do not take such a file for part of a checkpoint."""


class DeltaWeights(Weights):
    """Weights as deltas: `whole` writes checkpoints, and updates in between write only changed elements. For comparison
    a rank keeps its share of the last version.

    The last checkpoint and the deltas since then form a chain. All of it stays until the next checkpoint. A server gets
    the links after its own version, or the whole chain if it has none of them. A checkpoint is written as often as
    `delta.full_every` says, if deltas save nothing, or once the deltas of the chain have as many bytes as the
    checkpoint.
    """

    way = "delta"

    def __init__(self, whole: DiskWeights, delta: WeightDelta) -> None:
        self._whole, self._folders = whole, whole.folders
        self._turns, self._turn = DeltaTurns(delta.full_every), DeltaTurn.PLAIN
        self._keeps_on_host = delta.keep_on == "host"
        self._changes = changes_on(whole.device)
        self._kept: dict[int, Mapping[str, Tensor]] = {}
        """This rank's share of the last version, by part."""
        self._wrote: dict[str, tuple[int, int]] = {}
        """Bytes and checksums of this update's delta files, by name."""
        self._chain: list[tuple[str, Path]] = []
        """Labels and folders of the chain, in order. The first folder is a checkpoint."""
        self._chain_bytes = self._num_bytes = 0
        """Bytes of the deltas in the chain, and of the last update."""

    def begin(self) -> None:
        is_long = len(self._chain) > 1 and self._chain_bytes >= self._whole.num_bytes
        self._turn, self._wrote = self._turns.next(lost=is_long), {}
        if self._turn is DeltaTurn.PLAIN:
            self._kept = {}
        self._whole.begin()

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        return self._whole.tensors(part)

    def arrived(self, part: int) -> None:
        """Writes the part's tensors or their changes durably."""
        held = self._whole.held
        if self._turn is DeltaTurn.CHANGES:
            self._write_changes(part, held)
            return
        self._whole.arrived(part)
        if self._turn is DeltaTurn.WHOLE:
            self._kept[part] = {name: tensor.cpu() for name, tensor in held.items()} if self._keeps_on_host else held

    def complete(self, version: int) -> None:
        """Completes the update, as `DiskWeights` does. A new checkpoint removes the deltas before it."""
        label = self._whole.label_of(version)
        if self._turn is DeltaTurn.CHANGES:
            path, all_wrote = self._complete_delta(version, label)
            self._chain.append((label, path))
            self._num_bytes = sum(num_bytes for wrote in all_wrote for num_bytes, _ in wrote.values())
            self._chain_bytes += self._num_bytes
        else:
            deltas = [path for _, path in self._chain[1:]]
            self._whole.complete(version)
            self._folders.remove(deltas)
            assert self._whole.path is not None, "it is complete"
            self._chain, self._chain_bytes = [(label, self._whole.path)], 0
            self._num_bytes = self._whole.num_bytes
        self._turns.finished(self._turn, self._num_bytes / max(1, self._whole.num_bytes))
        self.label = label

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """Delivers the links of the chain after the server's version. Delivers the whole chain if the server has no
        version of it, or refuses a delta."""
        label = await protocol.version(calls)
        labels = [of for of, _ in self._chain]
        first = labels.index(label) + 1 if label in labels else 0
        try:
            await self._load(protocol, calls, self._chain[first:])
        except ServerRefuses as refused:
            if not first:
                raise
            logger.warning("%s refuses the changes and is given the whole checkpoint: %s", calls.url, refused)
            await self._load(protocol, calls, self._chain)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/weight_files_bytes": float(self._num_bytes),
            "rollout/weight_files_are_full": float(self._turn is not DeltaTurn.CHANGES),
        }

    def close(self) -> None:
        self._whole.close()

    async def _load(self, protocol: ServerProtocol, calls: Calls, chain: Sequence[tuple[str, Path]]) -> None:
        for label, path in chain:
            await protocol.load_from_disk(calls, str(path), label, self._whole.update_timeout_s)

    def _write_changes(self, part: int, held: Mapping[str, Tensor]) -> None:
        if changed := encoded(self._changes, held, self._kept[part]):
            path = self._whole.partial / FILE.format(self._whole.rank, part)
            self._wrote[path.name] = self._folders.writing(path, lambda: write_changes(path, changed))
        self._whole.held = {}

    def _complete_delta(self, version: int, label: str) -> tuple[Path, list[dict[str, Any]]]:
        base = self._chain[-1][0]

        def finish(partial: Path, all_wrote: list[dict[str, tuple[int, int]]]) -> None:
            files = {name: record for wrote in all_wrote for name, record in wrote.items()}
            text = form.manifest_text(base, label, files)
            (partial / form.MANIFEST).write_text(text)

        return self._folders.complete(DELTA_FOLDER.format(version), self._wrote, finish)
