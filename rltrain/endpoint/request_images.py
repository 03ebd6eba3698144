"""Images of requests: their bytes in messages, and their pixels in the store of the node."""

import asyncio
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from rltrain.config import schema
from rltrain.data.chat_template import text_of
from rltrain.data.image_parts import IMAGE, TEXT, kind_of
from rltrain.data.images import DATA_URL, SHOWN_CHARS, ImageRules, ImageSource, source_of
from rltrain.environments.interface import Message
from rltrain.errors import DataError
from rltrain.runtime.image_files import ImageMissing, ImageStore

# Messages with images.

NO_IMAGES = "this endpoint takes no images: model.vision is not set, or rltrain serve has no --vision"
HOLDERS = ("image_url", "image")
"""The keys of a part that may have the data URL of its image."""
DETAILS = (None, "auto", "high")
"""Accepted values of OpenAI's field detail. The size of images follows the rules of the run alone."""


def content_of(message: Mapping[str, Any], *, sees: bool) -> str | list[dict[str, Any]]:
    """Returns a message's content as text, or as parts if it has images.

    Parts of images have an ImageSource with bytes. Raises DataError for images that are not data URLs, so that no
    request has the server open a file or a connection. Raises it for all images unless the model `sees`.
    """
    content = message.get("content")
    if not sees or not isinstance(content, list) or all(kind_of(part) != IMAGE for part in content):
        return text_of(content, NO_IMAGES)
    if message.get("role") == "assistant":
        raise DataError("a message of the assistant has an image; expected texts, as the model writes no images")
    return [
        {"type": IMAGE, IMAGE: _image_in(part)} if kind_of(part) == IMAGE else {"type": TEXT, TEXT: text_of([part])}
        for part in content
    ]


def _image_in(part: Mapping[str, Any]) -> ImageSource:
    held: Any = next((part[name] for name in HOLDERS if part.get(name) is not None), None)
    detail = part.get("detail")
    if isinstance(held, Mapping):
        held, detail = held.get("url"), held.get("detail", detail)
    if detail not in DETAILS:
        raise DataError(
            f"an image has detail {str(detail)[:SHOWN_CHARS]!r}; expected auto or high, as all images have the limits "
            "of data.images"
        )
    if isinstance(held, ImageSource):  # of an earlier response, so it was read from a data URL
        return held
    if not isinstance(held, str) or not held.startswith(DATA_URL):
        raise DataError(
            f"an image is given as {str(held)[:SHOWN_CHARS]!r}; expected the URL data:image/...;base64, and base64 "
            "text, as files and addresses are not opened for requests"
        )
    return source_of(held)


def shared_content(content: Any) -> Any:
    """Returns a message's content for comparison: its text, or a list with the digests of its images."""
    if not isinstance(content, list | tuple) or all(kind_of(part) != IMAGE for part in content):
        return text_of(content)
    return [_digest(part[IMAGE].read()).hex() if kind_of(part) == IMAGE else [text_of([part])] for part in content]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# Pixels of images.

MAX_BODY_BYTES = 64 * 2**20
"""Most bytes of a request with images, since clients send all earlier images again."""

DECODERS = 4
"""Number of threads that decode images. They also bound the memory of large ones."""


class _Shared:
    """Holds an encoded image for all messages with it."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source


class RequestImages:
    """The images of an endpoint's requests, decoded into `store` and held for their sessions.

    `step` returns the step of the present task. Methods may be called from several threads.
    """

    def __init__(self, store: ImageStore, rules: ImageRules, step: Callable[[], int]) -> None:
        self.store, self.rules, self._step = store, rules, step
        self._guard = threading.Lock()
        self._keys: dict[str, set[int]] = {}
        """The keys of the images of each session."""
        self._known: WeakValueDictionary[bytes, _Shared] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="request-images")

    def shared(self, message: Message) -> Message:
        """Returns a message of `content_of` with one object for all equal images in use. Clients send the earlier
        images again with every turn."""
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._shared_part(part) if part["type"] == IMAGE else part for part in content]}

    def _shared_part(self, part: dict[str, Any]) -> dict[str, Any]:
        known = self._known.setdefault(_digest(part[IMAGE].read()), _Shared(part[IMAGE]))
        return {**part, IMAGE: known.source, "held_by": known}

    async def keep(self, session: str, sources: Sequence[ImageSource]) -> None:
        """Waits until the images are decoded. Holds them until the end of the step, and in further steps by
        `hold_again` until `forget`. Raises DataError if one cannot be read."""
        await asyncio.wrap_future(self._threads.submit(self._keep, session, sources))

    def _keep(self, session: str, sources: Sequence[ImageSource]) -> None:
        for source in dict.fromkeys(sources):
            key = self.rules.placed(source, 0).key
            try:
                self._hold(session, key)
            except ImageMissing:
                self.store.put(key, self.rules.decoded(source), self._step())
                self._hold(session, key)

    def _hold(self, session: str, key: int) -> None:
        with self._guard:
            self.store.hold([key], self._step())
            self._keys.setdefault(session, set()).add(key)

    def hold_again(self) -> None:
        """Holds the images of all sessions until the end of the present step."""
        with self._guard:
            self.store.hold(set().union(*self._keys.values()), self._step())

    def forget(self, session: str) -> None:
        """Holds the images of an ended session in no further step."""
        with self._guard:
            self._keys.pop(session, None)


# The images of a server outside of a job.

PERIOD_S = 5.0
CACHE_BYTES = 1e9
"""Most bytes of decoded images that no session uses."""


class ServedImages(RequestImages):
    """The images of a server without steps of training. Its steps are periods of time, begun by `advance`."""

    def __init__(self, store: ImageStore, rules: ImageRules) -> None:
        super().__init__(store, rules, lambda: self.period)
        self.period, self._began = 0, time.monotonic()

    @classmethod
    def open(cls, checkpoint: Path, config_key: str) -> Self:
        """Opens a store for the images of a checkpoint's server. Raises UserError if the checkpoint has no usable image
        processor, or if there is no folder for a store."""
        rules = ImageRules.read(checkpoint, schema.Images(), config_key)
        name = f"serve {secrets.token_hex(8)}"
        return cls(ImageStore.open(name, 0, folder=None, keep_steps=1, cache_bytes=CACHE_BYTES), rules)

    def advance(self) -> None:
        """Removes the images of ended sessions, once in a while."""
        if time.monotonic() - self._began < PERIOD_S:
            return
        self.period, self._began = self.period + 1, time.monotonic()
        self.hold_again()
        self.store.release_before(self.period)
