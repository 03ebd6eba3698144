"""Images in chat messages: the forms of their parts, and the places for the images of a row."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.data.images import HOLDERS, VIDEO_CURE, ImageSource, is_given, source_of
from rltrain.environments.interface import Message
from rltrain.errors import DataError

MARK = "<image>"
"""A place for an image in a text, as in verl's rows. It also stands for an image where a prompt is shown as text."""
VIDEO_MARK = "<video>"
IMAGE, TEXT, VIDEO = "image", "text", "video"
TYPES = {
    **dict.fromkeys((IMAGE, "image_url", "input_image"), IMAGE),
    **dict.fromkeys((TEXT, "input_text"), TEXT),
    **dict.fromkeys((VIDEO, "video_url", "input_video"), VIDEO),
}
"""The kind of each type of part. Clients and libraries use different names."""


def kind_of(part: Any) -> str | None:
    """Returns IMAGE, TEXT or VIDEO, or None for a part of another kind."""
    if isinstance(part, str):
        return TEXT
    if not isinstance(part, Mapping):
        return None
    if part.get("type") is not None:
        return TYPES.get(part["type"]) if isinstance(part["type"], str) else None
    return next((kind for name, kind in TYPES.items() if part.get(name) is not None), None)


def with_sources(message: Message, folder: Path = Path()) -> dict[str, Any]:
    """Returns the message with an ImageSource under "image" in every part of type image.

    The value is None in parts without an image, which are places for the images of a row. Relative paths are below
    `folder`. Raises DataError for parts of other kinds, unusable images, and images of the assistant.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = [_part(part, folder) for part in content]
    if message["role"] == "assistant" and any(part["type"] == IMAGE for part in parts):
        raise DataError("a message of the assistant has an image; expected texts, as the model writes no images")
    return {**message, "content": parts}


def _part(part: Any, folder: Path) -> dict[str, Any]:
    kind = kind_of(part)
    if kind == TEXT:
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str):
            return {"type": TEXT, "text": text}
    if kind == IMAGE:
        has_image = any(is_given(part.get(name)) for name in HOLDERS)
        return {"type": IMAGE, "image": source_of(part, folder) if has_image else None}
    if kind == VIDEO:
        raise DataError(f"a message's content has a part of type 'video'; {VIDEO_CURE}")
    given = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(f"a message's content has a part of type {given!r}; expected parts of type 'text' or 'image'")


def images_of(messages: Iterable[Message]) -> tuple[ImageSource, ...]:
    """Returns the images of messages in order. Raises DataError like `with_sources`, and if a part has no image."""
    found = []
    for part in _image_parts(messages):
        if part["image"] is None:
            raise DataError("a part of type 'image' has no image; expected image, image_url, url, path or base64")
        found.append(part["image"])
    return tuple(found)


def _image_parts(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.get("content"), list | tuple):
            yield from (part for part in with_sources(message)["content"] if part["type"] == IMAGE)


def without_sources(message: Message) -> dict[str, Any]:
    """Returns the message with parts of type image as the chat template takes them. Raises DataError like
    `with_sources`."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = with_sources(message)["content"]
    return {**message, "content": [{"type": IMAGE} if part["type"] == IMAGE else part for part in parts]}


def written(content: Any) -> str:
    """Returns a message's content as text, with MARK for images. The parts are those of `with_sources`."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        MARK if kind_of(part) == IMAGE else part if isinstance(part, str) else part["text"] for part in content
    )


def with_references(value: Any) -> Any:
    """Returns a value with `ImageSource.reference` in the place of each image, so that JSON can hold it.

    Images are sources, bytes, and objects with bytes. Paths and data URLs are references already.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return ImageSource(None, value["bytes"]).reference
        return {name: with_references(part) for name, part in value.items()}
    if isinstance(value, ImageSource):
        return value.reference
    if isinstance(value, bytes):
        return ImageSource(None, value).reference
    return [with_references(part) for part in value] if isinstance(value, list | tuple) else value


def with_images(messages: Sequence[Message], images: Sequence[ImageSource]) -> list[dict[str, Any]]:
    """Returns the messages with the images of a row at their places.

    A place is a part of type image without an image. If no part is of type image, each MARK is a place, and without
    such marks the images come first in the user's first message. Turns of the assistant have no places. Raises
    DataError if the numbers of places and images differ.
    """
    placed = [dict(message) for message in messages]
    if not any(True for _ in _image_parts(messages)):
        placed = [_divided(message) for message in placed]
        if images and not any(True for _ in _image_parts(placed)):
            placed = _at_the_beginning(placed, len(images))
    num_places = sum(part["image"] is None for part in _image_parts(placed))
    if num_places != len(images):
        raise DataError(
            f"{len(images)} images, but {num_places} places for them in the messages; expected as many {MARK} marks, "
            "or parts of type 'image' without an image"
        )
    remaining = iter(images)
    return [_filled(message, remaining) for message in placed]


def _divided(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its texts divided at MARK."""
    if message["role"] == "assistant" or MARK not in written(message.get("content")):
        return message
    content = message["content"]
    parts = with_sources({**message, "content": [content] if isinstance(content, str) else content})["content"]
    return {**message, "content": [new for part in parts for new in _divided_text(part["text"])]}


def _divided_text(text: str) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield {"type": IMAGE, "image": None}
        if piece:
            yield {"type": TEXT, "text": piece}


def _at_the_beginning(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return messages
    content = messages[first]["content"]
    parts = [content] if isinstance(content, str) else content
    places = [{"type": IMAGE, "image": None} for _ in range(num_images)]
    shown = with_sources({**messages[first], "content": [*places, *parts]})
    return [*messages[:first], shown, *messages[first + 1 :]]


def _filled(message: dict[str, Any], images: Iterator[ImageSource]) -> dict[str, Any]:
    if not isinstance(message.get("content"), list | tuple):
        return message
    parts = with_sources(message)["content"]
    filled = [part if part.get("image", True) is not None else {**part, "image": next(images)} for part in parts]
    return {**message, "content": filled}
