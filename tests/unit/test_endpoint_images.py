"""Images in requests to the endpoint: their tokens and pixels, conversations with them, and what is refused."""

import base64
import io
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rltrain.config import schema
from rltrain.data.images import ImageRules
from rltrain.data.tokenizer import load_tokenizer
from rltrain.endpoint import request_images
from rltrain.endpoint.request_images import RequestImages, ServedImages
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.runtime.image_files import ImageMissing, ImageStore
from tests.support.talking_engine import OWNER, Endpoint, TalkingEngine, endpoint
from tests.support.vision_checkpoints import IMAGE_TOKEN, write_checkpoint

RED, BLUE = (220, 30, 30), (30, 60, 220)
IMAGE_TOKENS = 16
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
PATHS = {"chat": "chat/completions", "responses": "responses", "anthropic": "messages"}


def picture(*colours: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Returns stripes of the colours, 56 pixels wide and high."""
    return np.array(colours, dtype=np.uint8).repeat(56 // len(colours), axis=0)[:, None].repeat(56, axis=1)


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def part(api: str, data: bytes) -> dict[str, Any]:
    """Returns the part of a message with an image, as the API's clients write it."""
    text = base64.b64encode(data).decode()
    if api == "anthropic":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
    url = f"data:image/png;base64,{text}"
    if api == "responses":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def said(api: str, text: str) -> dict[str, Any]:
    return {"type": "input_text" if api == "responses" else "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def asked(api: str, *messages: dict[str, Any]) -> dict[str, Any]:
    if api == "responses":
        return {"input": [*messages]}
    return {"messages": [*messages], "max_tokens": 20}


class LookingEngine(TalkingEngine):
    """An engine that looks at the images of a sample in the store. It answers with their shares of red, in percent."""

    def __init__(self, store: ImageStore, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda text: self.answer)
        self.store, self.answer = store, ""

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        for sample in samples:
            shares = [(self.store.pixels(image.key) == RED).all(axis=-1).mean() for image in sample.images]
            self.answer = ",".join(f"{100 * share:.0f}" for share in shares)
            super().submit([sample], sampling)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3_vl")
    return folder


@contextmanager
def opened(folder: Path) -> Iterator[ImageStore]:
    with closing(ImageStore.open("test", 0, folder=str(folder), keep_steps=1, cache_bytes=0)) as store:
        yield store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    with opened(tmp_path_factory.mktemp("images")) as store:
        yield store


class Clock:
    step = 0


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def images(checkpoint: Path, store: ImageStore, clock: Clock) -> RequestImages:
    return RequestImages(store, ImageRules.read(checkpoint, schema.Images()), lambda: clock.step)


@pytest.fixture(scope="module")
def seeing(checkpoint: Path, store: ImageStore, images: RequestImages) -> Iterator[Endpoint]:
    tokenizer = load_tokenizer(checkpoint)
    engine = LookingEngine(store, tokenizer)
    with endpoint(lambda text: "", drawn_by=engine, tokenizer=tokenizer, images=images) as running:
        running.engine = engine
        yield running


class Client:
    """A client of a session, or one with another token."""

    def __init__(self, running: Endpoint, token: str | None = None) -> None:
        self.running, self.opened = running, running.server.open_session()
        self.token = token or self.opened.token

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.post(f"{self.running.url}/v1/{path}", json=body, headers=headers, timeout=20)

    def ask(self, *messages: dict[str, Any]) -> dict[str, Any]:
        """Returns the assistant's message."""
        answer = self.post(PATHS["chat"], asked("chat", *messages))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    def samples(self) -> list[Sample]:
        return [one.sample for one in self.running.record(self.opened.id).trajectories]


@pytest.fixture
def client(seeing: Endpoint) -> Client:
    return Client(seeing)


def ids_of(running: Endpoint, *contents: str) -> tuple[int, ...]:
    """Returns the ids of a chat, as written by hand, up to the start of the model's turn."""
    roles = ("user", "assistant") * len(contents)
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in zip(roles, contents, strict=False))
    ids = running.engine.tokenizer(f"{text}<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    return tuple(token for one in ids for token in [one] * (IMAGE_TOKENS if one == IMAGE_TOKEN else 1))


# Tokens, places and pixels.


@pytest.mark.parametrize("api", PATHS)
def test_the_engine_gets_the_tokens_and_pixels_of_images(client: Client, store: ImageStore, api: str) -> None:
    shown = [picture(RED, BLUE), picture(BLUE)]
    parts = [part(api, png(shown[0])), said(api, "and"), part(api, png(shown[1])), said(api, "red?")]
    answer = client.post(PATHS[api], asked(api, user(*parts)))
    assert answer.status_code == 200 and '"50,0"' in answer.text, answer.text
    (sample,) = client.samples()
    assert sample.prompt == ids_of(client.running, f"{PLACE}and{PLACE}red?")
    assert [image.grid for image in sample.images] == [(1, 8, 8)] * 2
    for image, pixels in zip(sample.images, shown, strict=True):
        assert sample.prompt[image.begin : image.begin + IMAGE_TOKENS] == (IMAGE_TOKEN,) * IMAGE_TOKENS
        assert np.array_equal(store.pixels(image.key), pixels[None])
    usage = answer.json()["usage"]
    assert len(sample.prompt) == usage["prompt_tokens" if api == "chat" else "input_tokens"]


def test_results_of_tools_may_be_images(client: Client) -> None:
    use = {"type": "tool_use", "id": "call00001", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": [part("anthropic", png(picture(RED)))]}
    told = [user(said("anthropic", "look")), {"role": "assistant", "content": [use]}, user(result)]
    answer = client.post(PATHS["anthropic"], asked("anthropic", *told))
    assert answer.status_code == 200 and '"100"' in answer.text, answer.text


def test_tokens_of_images_are_counted(client: Client) -> None:
    message = user(part("anthropic", png(picture(BLUE))), said("anthropic", "red?"))
    counted = client.post("messages/count_tokens", {"messages": [message]})
    assert counted.json() == {"input_tokens": len(ids_of(client.running, f"{PLACE}red?"))}


# Conversations.


def test_a_turn_after_images_goes_on_with_new_ones(client: Client) -> None:
    first = user(part("chat", png(picture(RED, BLUE))), said("chat", "red?"))
    answer = client.ask(first)
    second = user(said("chat", "and"), part("chat", png(picture(RED))))
    assert client.ask(first, answer, second)["content"] == "50,100"
    (sample,) = client.samples()
    assert sample.context == (*ids_of(client.running, f"{PLACE}red?", "50", f"and{PLACE}"), *sample.last_turn)
    assert len(sample.turns) == 2
    for image in sample.images:
        assert sample.context[image.begin : image.begin + IMAGE_TOKENS] == (IMAGE_TOKEN,) * IMAGE_TOKENS
    assert not any(sample.loss_mask[image.begin - len(sample.prompt)] for image in sample.images[1:])


def test_another_image_with_the_same_words_begins_a_trajectory(client: Client) -> None:
    answer = client.ask(user(part("chat", png(picture(RED, BLUE))), said("chat", "red?")))
    changed = user(part("chat", png(picture(BLUE, RED))), said("chat", "red?"))
    client.ask(changed, answer, user(said("chat", "sure?")))
    first, second = client.samples()
    assert first.images[0].key != second.images[0].key and len(second.turns) == 1
    assert second.prompt == ids_of(client.running, f"{PLACE}red?", "50", "sure?")


def test_a_response_is_continued_with_its_images(client: Client) -> None:
    parts = part("responses", png(picture(RED))), said("responses", "red?")
    first = client.post("responses", asked("responses", user(*parts))).json()
    second = client.post("responses", {"input": "sure?", "previous_response_id": first["id"]})
    assert second.status_code == 200, second.text
    (sample,) = client.samples()
    assert len(sample.turns) == 2 and len(sample.images) == 1


def test_ids_go_on_after_images_of_a_chat(client: Client) -> None:
    answer = client.post(
        PATHS["chat"], {**asked("chat", user(part("chat", png(picture(RED))))), "return_token_ids": True}
    ).json()
    ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"], 40]
    assert client.post("completions", {"prompt": ids, "max_tokens": 20}).json()["choices"][0]["text"] == "100"
    (sample,) = client.samples()
    assert len(sample.turns) == 2 and len(sample.images) == 1


def test_images_are_held_as_long_as_their_session(
    client: Client, images: RequestImages, store: ImageStore, clock: Clock
) -> None:
    client.ask(user(part("chat", png(picture(RED, BLUE, RED, BLUE)))))
    (sample,) = client.samples()
    for _ in range(3):
        clock.step += 1
        images.hold_again()
        store.release_before(clock.step)
        assert store.shape(sample.images[0].key) == (1, 56, 56)
    images.forget(client.opened.id)
    for _ in range(3):
        clock.step += 1
        images.hold_again()
        store.release_before(clock.step)
    with pytest.raises(ImageMissing):
        store.pixels(sample.images[0].key)


def test_a_server_keeps_images_until_their_sessions_or_requests_end(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_images, "PERIOD_S", 0.0)
    tokenizer, rules = load_tokenizer(checkpoint), ImageRules.read(checkpoint, schema.Images())
    with opened(tmp_path) as store:
        images, engine = ServedImages(store, rules), LookingEngine(store, tokenizer)
        with endpoint(lambda text: "", drawn_by=engine, tokenizer=tokenizer, images=images) as running:
            check_held_images(running, engine, images)


def check_held_images(running: Endpoint, engine: LookingEngine, images: ServedImages) -> None:
    client, passing, store = Client(running), Client(running, OWNER), images.store
    client.ask(user(part("chat", png(picture(RED)))))
    passing.ask(user(part("chat", png(picture(BLUE)))))
    held, dropped = (sample.images[0].key for sample in engine.submitted)
    for _ in range(3):
        images.advance()
    assert store.missing([held, dropped]) == [dropped]
    images.forget(client.opened.id)
    for _ in range(3):
        images.advance()
    assert store.missing([held]) == [held]


# Refusals.


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """Returns a file that blocks whoever opens it."""
    os.mkfifo(tmp_path / "secret.png")
    return str(tmp_path / "secret.png")


@pytest.mark.parametrize("form", ["PATH", "file://PATH", "http://ADDRESS/a.png", "https://ADDRESS/a.png"])
def test_files_and_addresses_are_refused_unopened(client: Client, secret: str, form: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.setblocking(False)
        host, port = listening.getsockname()
        url = form.replace("PATH", secret).replace("ADDRESS", f"{host}:{port}")
        for path, body in {
            "chat/completions": asked("chat", user({"type": "image_url", "image_url": {"url": url}})),
            "responses": asked("responses", user({"type": "input_image", "image_url": url})),
            "messages": asked("anthropic", user({"type": "image", "source": {"type": "url", "url": url}})),
            "messages/count_tokens": {"messages": [user({"type": "image", "source": {"type": "url", "url": url}})]},
        }.items():
            answer = client.post(path, body)
            assert answer.status_code == 400, answer.text
            assert "files and addresses are not opened" in answer.text or "nothing is downloaded" in answer.text
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "image", "path": "PATH"}, "an image is given as 'None'"),
        ({"type": "image", "image": {"path": "PATH"}}, "an image is given as 'None'"),
        ({"image": "PATH"}, "files and addresses are not opened"),
        ({"type": "image", "image": {"bytes": "PATH"}}, "an image is given as 'None'"),
        ({"type": "input_image", "file_id": "file-1"}, "an image is given as 'None'"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}, "expected data:image/...;base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "expected data:image/...;base64"),
        ({"type": "image_url", "image_url": {"url": "data:video/mp4;base64,AA=="}}, "is a video"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}, "has detail 'low'"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "a part of type 'video_url'"),
        (part("chat", b"no image"), "an image of 8 bytes cannot be used"),
        (part("chat", png(picture(RED))[:-30]), "cannot be used as an image"),
        ({"type": "text", "text": f"a text with {PLACE}"}, "0 images, but 1 places"),
    ],
)
def test_other_images_are_refused(client: Client, secret: str, given: dict[str, Any], expected: str) -> None:
    body = asked("chat", user({name: secret if value == "PATH" else value for name, value in given.items()}))
    answer = client.post(PATHS["chat"], body)
    assert answer.status_code == 400 and expected in answer.json()["error"]["message"], answer.text
    assert not client.samples()


def test_the_model_draws_no_images(client: Client) -> None:
    drawn = {"role": "assistant", "content": [part("chat", png(picture(RED)))]}
    answer = client.post(PATHS["chat"], asked("chat", user(said("chat", "draw")), drawn, user(said("chat", "more"))))
    assert answer.status_code == 400 and "a message of the assistant has an image" in answer.text


@pytest.mark.parametrize("prompt", [f"look: {PLACE}.", [40, 41, IMAGE_TOKEN, 42]], ids=["text", "ids"])
def test_placeholders_without_images_are_refused(client: Client, prompt: Any) -> None:
    answer = client.post("completions", {"prompt": prompt})
    assert answer.status_code == 400 and "the placeholder of images without an image" in answer.text


@pytest.mark.parametrize("api", PATHS)
def test_models_without_a_tower_take_no_images(api: str) -> None:
    with endpoint(lambda text: "x") as blind:
        body = asked(api, user(part(api, png(picture(RED)))))
        answer = httpx.post(f"{blind.url}/v1/{PATHS[api]}", json=body, headers={"Authorization": f"Bearer {OWNER}"})
        assert answer.status_code == 400 and "model.vision is not set" in answer.text
