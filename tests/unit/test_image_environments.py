"""Environments that show images: their messages, their episodes with an engine that looks, and what is refused."""

import base64
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from rltrain.config import schema
from rltrain.data.chat_format import ChatFormat
from rltrain.data.experience import Experience
from rltrain.data.images import Context, ImageRules
from rltrain.data.prompts import load_prompts
from rltrain.data.tokenizer import PromptEncoder, TextDecoder, load_tokenizer
from rltrain.environments.batch import EnvironmentFactory, EpisodeEvent
from rltrain.environments.encoding import BadAnswer, encode_observation
from rltrain.environments.host import EnvironmentHost
from rltrain.environments.interface import Action, Environment, Observation, StepResult, TokenIds
from rltrain.environments.worker import load_environment
from rltrain.errors import ConfigError, EpisodeError
from rltrain.models.vision import PlacedImage
from rltrain.roles.prompt_images import ImageDecoder
from rltrain.roles.scoring import MAX_OBSERVED, MAX_THUMBNAILS, Scorables, sample_records
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.episodes import ChatTurns, EnvironmentEpisodes, Observed, TurnLimits
from rltrain.rollout.groups import PromptGroups
from rltrain.rollout.sample import Sample, SampleGroup, Status, pack_groups
from rltrain.runtime.image_files import ImageStore
from tests.support.packed_experience import packed_experience
from tests.support.pixel_world import CELL, GOAL, ID, NAMES, WALKER, PixelWorld, letters, pixels, places, way
from tests.support.talking_engine import TalkingEngine
from tests.support.vision_checkpoints import IMAGE_TOKEN, MERGE, write_checkpoint

WORLD = f"gymnasium:tests.support.pixel_world:{ID}"
BY_NAME = {"action_names": [*NAMES]}
LIMITS = TurnLimits(max_turns=8, max_prompt_tokens=100, max_response_tokens=400, max_context_tokens=500, vocab_size=128)
SAMPLING = SamplingParams(1.0, 1.0, 0, 400, (2,))
NUM_SAMPLES = 2
IMAGE_TOKENS = 16
FAR = next(seed for seed in range(100) if len(way(*places(seed))) == 4)
"""A seed with four steps to the goal."""


def environment(function: str = WORLD, **options: Any) -> Environment:
    return load_environment(EnvironmentFactory(function, options, prompt_key="prompt"))()


def parts_of(observation: Any) -> list[dict[str, Any]]:
    """Returns the parts of an observation that is one message of the user."""
    (message,) = encode_observation(observation)
    assert message["role"] == "user"
    return message["content"]


def picture_of(part: dict[str, Any]) -> NDArray[np.uint8]:
    kind, _, encoded = part["image"].partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))


def pictures_of(observation: Observation) -> list[NDArray[np.uint8]]:
    return [picture_of(part) for part in parts_of(observation) if part["type"] == "image"]


def one(played: Environment, text: str) -> StepResult:
    (result,) = played.step([Action(text)])
    assert result is not None
    return result


# Messages of environments.


FRAME = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)


@pytest.mark.parametrize(
    "image", [FRAME, Image.fromarray(FRAME), Image.fromarray(FRAME).convert("RGBA")], ids=["array", "RGB", "RGBA"]
)
def test_images_in_messages_become_png_files(image: Any) -> None:
    (part, text) = parts_of([{"role": "user", "content": [{"type": "image", "image": image}, {"text": "what?"}]}])
    assert np.array_equal(picture_of(part), FRAME) and text == {"text": "what?"}


def test_images_may_be_given_as_openai_does_as_bytes_or_in_grey() -> None:
    grey = parts_of([{"role": "user", "content": ({"type": "image", "image": FRAME[:, :, 0]},)}])
    assert np.array_equal(picture_of(grey[0]), FRAME[:, :, :1].repeat(3, axis=2))
    (part,) = parts_of([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": FRAME}}]}])
    assert np.array_equal(picture_of({"image": part["image_url"]["url"]}), FRAME)
    (part,) = parts_of([{"role": "user", "content": [{"image": {"bytes": b"abc", "path": None}}]}])
    assert part["image"] == {"bytes": "data:image/*;base64,YWJj", "path": None}


@pytest.mark.parametrize(
    "array",
    [FRAME.astype(np.float32), FRAME[None], FRAME[:, :, :2], np.zeros((0, 4, 3), np.uint8)],
    ids=lambda a: a.shape,
)
def test_other_arrays_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(BadAnswer, match=r"an image is an array of .*; expected uint8 of \[height, width\] or"):
        encode_observation([{"role": "user", "content": [{"type": "image", "image": array}]}])


# Gymnasium's environments.


def test_pixel_observations_are_shown_as_images() -> None:
    world = environment(**BY_NAME)
    (first,) = world.reset([{}], [3])
    image, text = parts_of(first)
    walker, goal = places(3)
    assert np.array_equal(picture_of(image), pixels(walker, goal))
    assert text["text"] == "Answer with one of: left, right, up, down."
    steps = [NAMES[action] for action in way(walker, goal)]
    results = [one(world, f"I go {step}.") for step in steps]
    assert [result.done for result in results] == [False] * (len(steps) - 1) + [True]
    assert sum(result.reward for result in results) == 1.0
    assert [part["type"] for part in parts_of(results[0].observation)] == ["image"]
    assert one(world, "nowhere").observation == text["text"], "what is no action is asked for again, as text"


def test_a_rows_prompt_stands_before_the_image() -> None:
    world = environment()
    (first,) = world.reset([{"prompt": "Walk to the red cell."}], [3])
    assert [part.get("text", "image") for part in parts_of(first)] == ["Walk to the red cell.", "image"]
    (first,) = world.reset([{"prompt": [{"role": "system", "content": "You walk."}]}], [3])
    assert first[0] == {"role": "system", "content": "You walk."} and len(pictures_of(first[1:])) == 1


def test_the_drawing_is_shown_with_the_texts_of_the_observation() -> None:
    world = environment(render="rgb_array", make={"as_letters": True}, **BY_NAME)
    (first,) = world.reset([{}], [3])
    image, text = parts_of(first)
    assert np.array_equal(picture_of(image), pixels(*places(3)))
    assert text["text"].startswith("."), "the letters are a text"
    worlds = environment(render="rgb_array", vectorization="sync", make={"as_letters": True})
    for shown, seed in zip(worlds.reset([{}, {}], [3, FAR]), (3, FAR), strict=True):
        image, text = parts_of(shown)
        assert np.array_equal(picture_of(image), pixels(*places(seed)))
        assert text["text"] == f"{letters(*places(seed))}\nAnswer with a number from 0 to 3."


def zoom(observation: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return observation[::CELL, ::CELL]


def test_a_function_may_make_the_image() -> None:
    world = environment(render=f"{__name__}:zoom")
    (first,) = world.reset([{}], [3])
    assert np.array_equal(*pictures_of(first), zoom(pixels(*places(3))))


def walked(walker: tuple[int, int], goal: tuple[int, int], actions: Sequence[int]) -> NDArray[np.uint8]:
    world = PixelWorld()
    world.walker, world.goal = walker, goal
    for action in actions:
        world.step(action)
    return world.render()


def test_several_actions_of_a_turn_are_stepped_in_order() -> None:
    walker, goal = places(FAR)
    actions = way(walker, goal)
    assert len(actions) == 4
    world = environment(action_chunk=3, frames=2, **BY_NAME)
    (first,) = world.reset([{}], [FAR])
    assert parts_of(first)[-1]["text"] == "Answer with up to 3 of: left, right, up, down."
    there = one(world, " ".join(NAMES[action] for action in actions[:3]))
    seen = [walked(walker, goal, actions[:count]) for count in (2, 3)]
    assert np.array_equal(pictures_of(there.observation), seen), "those of the last two steps"
    last = one(world, f"{NAMES[actions[3]]} {NAMES[actions[3]]}")
    assert (last.reward, last.done) == (1.0, True), "nothing is stepped after the end"


def test_numbers_make_up_actions_too() -> None:
    world = environment(action_chunk=2)
    world.reset([{}], [FAR])
    assert one(world, "first 9, then 0 and 1").info["invalid_actions"] == 0, "the last two"
    assert one(world, "0 and 4") == StepResult("Answer with up to 2 numbers from 0 to 3.", info={"invalid_actions": 1})
    pendulum = environment("gymnasium:Pendulum-v1", action_chunk=3)
    (first,) = pendulum.reset([{}], [3])
    assert str(first).endswith("\nAnswer with up to 3 times 1 numbers.")
    both, single = one(pendulum, "0.5 and -1.5"), environment("gymnasium:Pendulum-v1")
    single.reset([{}], [3])
    apart = [one(single, "0.5"), one(single, "-1.5")]
    assert both.observation == apart[1].observation
    assert both.reward == pytest.approx(sum(result.reward for result in apart))


def test_episodes_of_a_vector_environment_end_apart() -> None:
    worlds = environment(vectorization="sync", action_chunk=2, **BY_NAME)
    first = worlds.reset([{}, {}, {}], [FAR, FAR, 3])
    seeds = (FAR, FAR, 3)
    assert np.array_equal([pictures_of(shown)[0] for shown in first], [pixels(*places(seed)) for seed in seeds])
    steps = [NAMES[action] for action in way(*places(FAR))]
    first_two = Action(" ".join(steps[:2]))
    results = worlds.step([first_two, Action(steps[0]), None])
    assert results[2] is None
    assert results[1] is not None and results[1].done and results[1].info == {"invalid_actions": 1}
    assert results[0] is not None and np.array_equal(
        *pictures_of(results[0].observation), walked(*places(FAR), way(*places(FAR))[:2])
    )
    (won, *others) = worlds.step([Action(" ".join(steps[2:])), None, None])
    assert won is not None and (won.done, won.reward) == (True, 1.0) and others == [None, None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"render": "rgb_array", "make": {}, "function": "gymnasium:Blackjack-v1"}, None),
        ({"frames": 2}, "env.options: frames is 2 and action_chunk 1; expected at most action_chunk frames"),
        ({"action_chunk": 0}, "env.options.action_chunk is 0; expected a whole number, at least 1"),
        ({"render": "rgb_array", "function": f"{__name__}:Undrawn"}, "env.options.render is rgb_array, but the enviro"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], expected: str | None) -> None:
    options = dict(options)
    function = options.pop("function", WORLD)
    if expected is None:
        assert environment(function, **options)
        return
    with pytest.raises(ConfigError, match=expected):
        environment(function, **options)


class Undrawn(PixelWorld):
    metadata = {"render_modes": []}


# Episodes.


class Local:
    """The environments of a host in this process, as an engine uses them."""

    going_on: frozenset[int] = frozenset()

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host
        self.begin, self.act, self.abandon = host.begin, host.act, host.abandon

    def events(self) -> list[EpisodeEvent]:
        self.host.wait(10)
        return self.host.events()


class LookingEngine(TalkingEngine):
    """An engine that looks at the last image of a sample in the store. It answers with the way to the goal."""

    def __init__(self, store: ImageStore, tokenizer: Any, num_actions: int) -> None:
        super().__init__(tokenizer, lambda text: " ".join(self.named), context_tokens=LIMITS.max_context_tokens)
        self.store, self.num_actions = store, num_actions
        self.named: list[str] = []

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        for sample in samples:
            actions = way(*self._seen(sample.images[-1].key))
            self.named = [NAMES[action] for action in actions[: self.num_actions]]
            super().submit([sample], sampling)

    def _seen(self, key: int) -> tuple[tuple[int, int], tuple[int, int]]:
        cells = self.store.pixels(key)[0, ::CELL, ::CELL]
        walker, goal = (np.argwhere((cells == colour).all(axis=-1))[0].tolist() for colour in (WALKER, GOAL))
        return (walker[0], walker[1]), (goal[0], goal[1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3_vl")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    opened = ImageStore.open("test", 0, folder=str(tmp_path), keep_steps=1, cache_bytes=0)
    yield opened
    opened.close()


def turns_of(checkpoint: Path, *, sees: bool = True) -> ChatTurns:
    rules = ImageRules.read(checkpoint, schema.Images()) if sees else None
    return ChatTurns(ChatFormat(load_tokenizer(checkpoint), images=rules), None)


def keeper(store: ImageStore, checkpoint: Path) -> Callable[[Context], None]:
    decoder = ImageDecoder(store, ImageRules.read(checkpoint, schema.Images()))

    def keep(context: Context) -> None:
        sources = dict.fromkeys(context.sources, "an observation")
        decoder.hold([image.key for image in context.images], lambda: sources, 0)

    return keep


def wait_for(come: Callable[[], bool | None], what: str) -> None:
    raise AssertionError(f"nothing waits for {what}")


def played(checkpoint: Path, store: ImageStore, num_actions: int = 1, **options: Any) -> list[SampleGroup]:
    """Plays two groups of episodes. Their rows have the seeds 3 and FAR."""
    options = {**BY_NAME, **options}
    factory = EnvironmentFactory(WORLD, options, prompt_key="prompt")
    batch_size = 1 if "vectorization" not in options else NUM_SAMPLES
    with EnvironmentHost(factory, num_workers=1, batch_size=batch_size) as host:
        turns = turns_of(checkpoint)
        row_at = ({"prompt": "Go!", "seed": 3}, {"prompt": "Go!", "seed": FAR}).__getitem__
        episodes = EnvironmentEpisodes(
            [Local(host)], turns, LIMITS, row_at, wait_for, keep_images=keeper(store, checkpoint)
        )
        engine = LookingEngine(store, turns.chat_format.tokenizer, num_actions)

        def group_at(position: int) -> SampleGroup:
            ids = range(position * NUM_SAMPLES, (position + 1) * NUM_SAMPLES)
            return SampleGroup(position, position, tuple(Sample(number, (9,), seed=number) for number in ids))

        groups = PromptGroups(engine, SAMPLING, group_at, NUM_SAMPLES, episodes, max_turn_tokens=40)
        positions, finished = deque(range(2)), list[SampleGroup]()
        while positions or groups.begun:
            groups.start([positions.popleft() for _ in range(min(groups.num_wanted, len(positions)))])
            finished += groups.answer(groups.answers())
            finished += groups.step()
    return sorted(finished, key=lambda group: group.position)


@pytest.mark.parametrize("vectorization", [None, "sync"])
def test_every_turn_shows_the_world_as_it_is(checkpoint: Path, store: ImageStore, vectorization: str | None) -> None:
    options = {} if vectorization is None else {"vectorization": vectorization}
    groups = played(checkpoint, store, **options)
    for group, seed in zip(groups, (3, FAR), strict=True):
        walker, goal = places(seed)
        actions = way(walker, goal)
        for sample in group.samples:
            assert sample.status == Status.STOPPED and len(sample.turns) == len(actions) == len(sample.images)
            assert sum(sample.turn_rewards) == 1.0
            for count, image in enumerate(sample.images):
                assert np.array_equal(store.pixels(image.key)[0], walked(walker, goal, actions[:count]))
                shown = slice(image.begin, image.begin + IMAGE_TOKENS)
                assert sample.context[shown] == (IMAGE_TOKEN,) * IMAGE_TOKENS
            assert sample.context.count(IMAGE_TOKEN) == IMAGE_TOKENS * len(actions)


def test_tokens_of_images_are_observed_and_have_their_keys(checkpoint: Path, store: ImageStore) -> None:
    groups = played(checkpoint, store)
    experience = pack_groups(groups, [0, 1], merge=MERGE)
    samples = [sample for group in groups for sample in group.samples]
    keys = [image.key for sample in samples for image in sample.images for _ in range(IMAGE_TOKENS)]
    is_image = experience.tokens == IMAGE_TOKEN
    assert experience.image_keys[is_image].tolist() == keys
    assert not experience.image_keys[~is_image].any() and not experience.response_mask[is_image].any()
    tokenizer = load_tokenizer(checkpoint)
    drawn = [
        tokenizer.decode(tokens[mask].tolist())
        for tokens, mask in zip(
            experience.tokens.split(experience.lengths.tolist()),
            experience.response_mask.split(experience.lengths.tolist()),
            strict=True,
        )
    ]
    said = ["".join(f"{NAMES[action]}<|im_end|>" for action in way(*places(seed))) for seed in (3, 3, FAR, FAR)]
    assert drawn == said, "only the model's own tokens are trained on"


def test_chunks_of_actions_need_fewer_images(checkpoint: Path, store: ImageStore) -> None:
    groups = played(checkpoint, store, num_actions=3, action_chunk=3, frames=2)
    walker, goal = places(FAR)
    actions = way(walker, goal)
    for sample in groups[1].samples:
        assert len(sample.turns) == 2 and sum(sample.turn_rewards) == 1.0
        shown = [walked(walker, goal, actions[:count]) for count in (0, 2, 3)]
        assert np.array_equal([store.pixels(image.key)[0] for image in sample.images], shown)
        assert sample.images[2].begin - sample.images[1].begin == IMAGE_TOKENS + 2, "start and end tokens between them"


# Records of samples for users.


def records_of(checkpoint: Path, store: ImageStore, experience: Experience, folder: Path) -> list[dict[str, Any]]:
    rows, data = folder / "rows.jsonl", schema.Data(train=schema.PromptFile(path="rows.jsonl"))
    rows.write_text('{"prompt": "Go!", "label": ""}\n' * 2)
    rules = ImageRules.read(checkpoint, data.images)
    encoder = PromptEncoder(load_tokenizer(checkpoint), data, images=rules)
    file = schema.PromptFile(path=str(rows))
    dataset = load_prompts(file, data, encoder, needs="label", config_key="data.train")
    source = Scorables((), dataset, TextDecoder(encoder.tokenizer), file, "data.train")
    return [*sample_records(source, experience, 0, (), store)]


def colours_of(url: str) -> list[list[int]]:
    """Returns the colours of the walker's world in a small copy: the highest of each cell, red, green and blue."""
    kind, _, encoded = url.partition(",")
    assert kind == "data:image/jpeg;base64"
    cells = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))[CELL // 2 :: CELL, CELL // 2 :: CELL]
    return np.where(cells > 128, 1, 0).reshape(-1, 3).tolist()


def test_records_show_images_where_the_model_saw_them(checkpoint: Path, store: ImageStore, tmp_path: Path) -> None:
    groups = played(checkpoint, store)
    experience = pack_groups(groups, [0, 1], merge=MERGE).with_fields(rewards=torch.ones(2 * NUM_SAMPLES))
    records = records_of(checkpoint, store, experience, tmp_path)
    walker, goal = places(FAR)
    actions = way(walker, goal)
    record = records[-1]
    replies = [reply for turn in record["turns"] for reply in turn["replies"]]
    assert [reply["content"].count("<image>") for reply in replies] == [1, 1, 1]
    seen = [*record["images"], *(image for reply in replies for image in reply["images"])]
    expected = [walked(walker, goal, actions[:count])[CELL // 2 :: CELL, CELL // 2 :: CELL] for count in range(4)]
    assert [colours_of(url) for url in seen] == [np.where(of > 128, 1, 0).reshape(-1, 3).tolist() for of in expected]
    assert record["rendered_prompt"].count("<|image_pad|>") == 1


def test_records_of_long_episodes_have_few_small_copies(checkpoint: Path, store: ImageStore, tmp_path: Path) -> None:
    """An observation after the first turn has six images, and each of 6 turns shows them."""
    store.put(5, np.zeros((1, 56, 56, 3), np.uint8), 0)
    image, turn = [5] * IMAGE_TOKENS + [0], [0] * 2
    keys = [*image * 6, *turn] * 6
    drawn = [False] * 6 * len(image) + [True, False]
    experience = packed_experience([(0, len(keys))]).with_fields(
        tokens=torch.where(torch.tensor(keys) > 0, IMAGE_TOKEN, 7),
        image_keys=torch.tensor(keys),
        response_mask=torch.tensor(drawn * 6),
        prompt_ids=torch.tensor([0]),
    )
    (record,) = records_of(checkpoint, store, experience, tmp_path)
    observed = [reply for turn in record["turns"] for reply in turn["replies"] if "<image>" in reply["content"]]
    assert [reply["content"].count("<image>") for reply in observed] == [6] * 5
    assert len(record["images"]) == MAX_THUMBNAILS
    assert [len(reply.get("images", ())) for reply in observed] == [MAX_THUMBNAILS] * 4 + [0] and MAX_OBSERVED == 16


# What cannot show images.


class Scripted:
    """Environments with given first observations, by episode."""

    going_on: frozenset[int] = frozenset()

    def __init__(self, *observations: Any) -> None:
        self.observations = observations
        self.pending = list[EpisodeEvent]()

    def begin(self, episode: int, row: Any, seed: int) -> None:
        self.pending.append(EpisodeEvent(episode, self.observations[episode]))

    def abandon(self, episode: int) -> None:
        """Ends nothing."""

    def events(self) -> list[EpisodeEvent]:
        events, self.pending = self.pending, []
        return events


SHOWN = encode_observation([{"role": "user", "content": [{"type": "image", "image": pixels((0, 0), (1, 1))}]}])
DAMAGED = [{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,YWJj"}]}]


def begun(turns: ChatTurns, *observations: Any, sample: Sample | None = None, **more: Any) -> EnvironmentEpisodes:
    episodes = EnvironmentEpisodes([Scripted(*observations)], turns, LIMITS, lambda row: {}, wait_for, **more)
    samples = [replace(sample or Sample(0, (9,), seed=0), id=number) for number in range(len(observations))]
    episodes.begin(SampleGroup(0, 0, tuple(samples)), samples)
    return episodes


def test_images_for_a_model_that_does_not_see_end_the_job(checkpoint: Path) -> None:
    with pytest.raises(EpisodeError, match=r"shows images, but model.vision is not set; set model.vision: \{\}"):
        begun(turns_of(checkpoint, sees=False), SHOWN).answers(engine_is_idle=True)


def test_a_damaged_image_costs_its_episode_alone(checkpoint: Path, store: ImageStore) -> None:
    kept = keeper(store, checkpoint)
    episodes = begun(turns_of(checkpoint), DAMAGED, SHOWN, "say <|image_pad|>", keep_images=kept)
    failed, shown, said = episodes.answers(engine_is_idle=True)
    assert failed == Observed(0, Status.FAILED) and said == Observed(2, Status.FAILED)
    assert shown.status == Status.PENDING and len(shown.images) == 1
    with pytest.raises(EpisodeError, match="its observation cannot be shown: .*cannot be used as an image"):
        begun(turns_of(checkpoint), DAMAGED).answers(engine_is_idle=True)
        failing = begun(turns_of(checkpoint), DAMAGED)
        failing.answers(engine_is_idle=True)
        failing.metrics()


def test_turns_in_token_ids_have_no_images(checkpoint: Path) -> None:
    seeing = Sample(0, (7, 5, 8), seed=0, images=(PlacedImage(1, 99, (1, 2, 2)),))
    with pytest.raises(EpisodeError, match="asks for turns in token ids, but its row has 1 images; expected rows with"):
        begun(turns_of(checkpoint), TokenIds((1, 2)), sample=seeing).answers(engine_is_idle=True)
