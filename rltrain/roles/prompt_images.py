"""Images of rows in the store of this node: decoded by threads, and held by the ranks that need them."""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch.distributed as dist

from rltrain.data.experience import Experience
from rltrain.data.images import Context, ImageRules, ImageSource
from rltrain.data.prompts import PromptDataset
from rltrain.errors import DataError
from rltrain.exchange.image_requests import keys_of
from rltrain.rollout.sample import SampleGroup
from rltrain.runtime.image_files import ImageMissing, ImageStore
from rltrain.runtime.machine import JobThread

DECODERS = 4
"""Number of threads. Pillow decodes and resizes images of several threads at the same time."""
Sources = Mapping[ImageSource, str]
"""Images to decode, each with the place of its row for messages."""


class ImageDecoder:
    """Decodes images in threads of its own and puts them into the store. Its methods are called by one thread.

    `advance` is called after every awaited image, as a sign of life.
    """

    def __init__(self, store: ImageStore, rules: ImageRules, advance: Callable[[], None] = lambda: None) -> None:
        self.store, self.rules, self.advance = store, rules, advance
        self.num_decoded = self.num_found = 0
        """Requested images that were decoded, and those found in the store."""
        self._guard = threading.Lock()
        self._pending: dict[ImageSource, Future[None]] = {}
        self._requests: queue.SimpleQueue[tuple[ImageSource, int, Future[None]]] = queue.SimpleQueue()
        self._threads: list[JobThread] = []

    def request(self, sources: Iterable[ImageSource], step: int) -> None:
        """Starts to decode images for a task of `step`, without waiting. Nothing is done for images in the store."""
        self._pending = {source: future for source, future in self._pending.items() if not future.done()}
        for source in sources:
            if source not in self._pending:
                future = self._pending[source] = Future()
                self._requests.put((source, step, future))
        if not self._threads and self._pending:
            self._threads = [JobThread(target=self._run, name="images", daemon=True) for _ in range(DECODERS)]
            for thread in self._threads:
                thread.start()

    def hold(self, keys: Sequence[int], sources: Callable[[], Sources], step: int) -> None:
        """Holds the images of `keys` for this rank until the end of `step`. Decodes the images of `sources` first if
        the store lacks any.

        Raises DataError if an image cannot be decoded, or is not among `sources`.
        """
        try:
            self.store.hold(keys, step)
            return
        except ImageMissing:
            pass
        found = sources()
        self._decode(found, step)
        try:
            self.store.hold(keys, step)
        except ImageMissing as error:
            places = ", ".join(dict.fromkeys(found.values())) or "no row"
            raise DataError(
                f"the images of {places} are not those of its samples (keys {error.keys[:8]}). An image file has "
                "changed during the run, or since its checkpoint; expected unchanged files"
            ) from None

    def _decode(self, sources: Sources, step: int) -> None:
        self.request(sources, step)
        awaited = {source: self._pending[source] for source in sources}
        for source, future in awaited.items():
            try:
                future.result()
            except DataError as error:
                raise DataError(f"{sources[source]}: {error}") from None
            self.advance()

    def _run(self) -> None:
        while True:
            source, step, future = self._requests.get()
            try:
                self._put(source, step)
                future.set_result(None)
            except Exception as error:  # for the thread that waits for the image
                future.set_exception(error)

    def _put(self, source: ImageSource, step: int) -> None:
        key = self.rules.placed(source, 0).key
        is_missing = bool(self.store.missing([key]))
        if is_missing:
            self.store.put(key, self.rules.decoded(source), step)
        with self._guard:
            self.num_decoded += is_missing
            self.num_found += not is_missing


def sources_of(dataset: PromptDataset, rows: Iterable[int]) -> dict[ImageSource, str]:
    """Returns the images of rows, each with the place of the row."""
    return {source: dataset[row].origin for row in dict.fromkeys(rows) for source in dataset.image_sources(row)}


def hold_images(decoder: ImageDecoder, dataset: PromptDataset, experience: Experience, step: int) -> None:
    """Holds the images of samples for this rank until the end of `step`. The samples are from rows of `dataset`."""
    decoder.hold(keys_of(experience), lambda: sources_of(dataset, experience.prompt_ids.tolist()), step)


class ImageCounts:
    """Counts of all ranks, added up in the job's store."""

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("image_counts", store)
        self._published: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def publish(self, counts: Mapping[str, int]) -> None:
        """Adds the increase of this rank's `counts` since the last call."""
        for name, count in counts.items():
            if more := count - self._published.get(name, 0):
                self.store.add(name, more)
        self._published = {**counts}

    def take(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the increase of the job's counts since the last call."""
        totals = {name: int(self.store.add(name, 0)) for name in names}
        found = {name: total - self._taken.get(name, 0) for name, total in totals.items()}
        self._taken = totals
        return found


# Images of the prompts of an engine.


class PromptImages:
    """The images of an engine's prompts, on the engine's first rank. The prompts are rows of `dataset`.

    `row_at` returns the row of a position in the stream of prompts. `following` returns the positions that probably
    come after those of its argument. Their images are decoded ahead.
    """

    def __init__(
        self,
        decoder: ImageDecoder,
        dataset: PromptDataset,
        row_at: Callable[[int], int],
        following: Callable[[Sequence[int]], Sequence[int]] = lambda positions: (),
    ) -> None:
        self.decoder, self.dataset, self.row_at, self.following = decoder, dataset, row_at, following
        self.step = 0
        """The step of the present task."""
        self._contexts: dict[int, Context] = {}
        """Prompts of rows about to start."""
        self._requested = -1
        """The last position with images decoded ahead."""

    def begin(self, step: int, groups: Iterable[SampleGroup]) -> None:
        """Begins a task of `step`. Holds the images of started groups until its end."""
        self.step = step
        seeing = [(group, keys) for group in groups if (keys := keys_of_group(group))]
        keys = [key for _, of_group in seeing for key in of_group]
        self.decoder.hold(keys, lambda: sources_of(self.dataset, [group.row for group, _ in seeing]), step)

    def prepare(self, positions: Sequence[int]) -> None:
        """Waits until the images of the prompts at `positions` are decoded. Holds them until the end of the task."""
        rows = [*dict.fromkeys(map(self.row_at, positions))]
        self._contexts |= {row: self.dataset.context(row) for row in rows if row not in self._contexts}
        keys = [image.key for row in rows for image in self._contexts[row].images]
        self.decoder.hold(keys, lambda: sources_of(self.dataset, rows), self.step)
        ahead = [position for position in self.following(positions) if position > self._requested]
        if ahead:
            self._requested = max(ahead)
            self.decoder.request(sources_of(self.dataset, map(self.row_at, ahead)), self.step)

    def context(self, row: int) -> Context:
        """Returns the prompt of a row that starts."""
        found = self._contexts.pop(row, None)
        return self.dataset.context(row) if found is None else found


def keys_of_group(group: SampleGroup) -> list[int]:
    """Returns the keys of a group's images, each once."""
    return [*dict.fromkeys(image.key for sample in group.samples for image in sample.images)]
