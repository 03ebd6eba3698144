"""Images of samples, in the form of requests to SGLang."""

import base64
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

from PIL import Image

from rltrain.data.images import Context, png_of
from rltrain.rollout.engine import EngineSite
from rltrain.rollout.sample import Sample
from rltrain.runtime.image_files import ImageStore

MAX_ENCODED_BYTES = 2**28
"""Most characters of encoded images to keep for further requests."""


def wrong_length(sample: Sample, found: int | None) -> str | None:
    """Returns a message if a server has `found` tokens as the context of a sample, but the sample has others."""
    if found == len(sample.context):
        return None
    return (
        f"SGLang has a context of {found} tokens for sample {sample.id} with {len(sample.images)} images; expected "
        f"{len(sample.context)}. It has resized images or lost them. Use a version of SGLang that takes images with "
        "token ids, or <role>.engine: embedded"
    )


class ServerImages:
    """The images of samples for a server. `merge` is the height and width of a token in patches.

    Images are sent with the pixels of the store, so the server resizes none of them. They are encoded once for all
    samples of a prompt.
    """

    def __init__(self, store: ImageStore, merge: int) -> None:
        self._store, self._merge = store, merge
        self._encoded: OrderedDict[int, str] = OrderedDict()
        self._num_bytes = 0

    @classmethod
    def of(cls, site: EngineSite) -> Self | None:
        """Returns the images of an engine's samples, or None without model.vision."""
        vision = site.architecture.vision
        return None if site.images is None or vision is None else cls(site.images, vision.merge)

    def fields(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Returns the fields `input_ids` and `image_data` of a request for `samples`.

        Each image is one placeholder among the ids, because the server repeats placeholders itself.
        """
        ids = [Context(sample.context, sample.images).shortened(self._merge) for sample in samples]
        images = [[self._url(image.key) for image in sample.images] for sample in samples]
        return {"input_ids": ids, **({"image_data": [of or None for of in images]} if any(images) else {})}

    def _url(self, key: int) -> str:
        if (known := self._encoded.get(key)) is not None:
            self._encoded.move_to_end(key)
            return known
        png = png_of(Image.fromarray(self._store.pixels(key)[0]))
        url = self._encoded[key] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        self._num_bytes += len(url)
        while self._num_bytes > MAX_ENCODED_BYTES and len(self._encoded) > 1:
            self._num_bytes -= len(self._encoded.popitem(last=False)[1])
        return url
