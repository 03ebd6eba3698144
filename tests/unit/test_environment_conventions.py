"""Tests of unchanged environments of other frameworks."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from rltrain.environments import slime, worker
from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.gymnasium_adapter import default_parse, observation_text, without_colours
from rltrain.environments.interface import Action, Environment, StepResult, TokenIds, ToolCall
from rltrain.environments.slime import Episode, draw
from rltrain.environments.worker import load_environment
from rltrain.errors import ConfigError

WARMED_UP = Path(__file__).resolve().parents[1] / "warmed_up"


def environment(function: str, factory: Mapping[str, Any] | None = None, **options: Any) -> Environment:
    """Returns the environment of a name. Names without a module belong to this module."""
    name = function if ":" in function else f"{__name__}:{function}"
    return load_environment(EnvironmentFactory(name, options, **factory or {}))()


def one(played: Environment, text: str, *calls: ToolCall) -> StepResult:
    (result,) = played.step([Action(text, calls)])
    return result


def step_each(played: Environment, *texts: str | None) -> list[StepResult | None]:
    """Steps a batch of episodes. Episodes without a text wait."""
    return list(played.step([None if text is None else Action(text) for text in texts]))


class SearchEnvironment:
    """An environment in the form of SkyRL-Gym's BaseTextEnv."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self.url = env_config.search.url
        self.answer = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras["max_turns"]
        self.turns = 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": self.url}, *prompt], {}

    def step(self, action: str) -> Mapping[str, Any]:
        self.turns += 1
        done = action == self.answer or self.turns == self.max_turns
        told = [] if done else [{"role": "user", "content": f"not {action}"}]
        return {"observations": told, "reward": float(action == self.answer), "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def close(self) -> None: ...


def test_skyrl_gym() -> None:
    row = {"prompt": "Where?", "reward_spec": {"ground_truth": "here"}}
    played = environment("SearchEnvironment", search={"url": "u"}, max_turns=3)
    (first,) = played.reset([row], [0])
    assert first == [{"role": "system", "content": "u"}, {"role": "user", "content": "Where?"}]
    assert one(played, "there") == StepResult([{"role": "user", "content": "not there"}])
    assert one(played, "here") == StepResult([], 1.0, True, {"turns": 2})
    played.reset([row], [0])
    assert [one(played, "there").done for _ in range(3)] == [False, False, True]
    played.close()


class Counter:
    """An environment in the form of TRL's environment_factory."""

    def reset(self, start: int, **columns: Any) -> str | None:
        self.count = start
        return f" It is at {start}." if start else None

    def add(self, amount: int, times: int = 1) -> str:
        """Adds to the counter.

        Args:
            amount: how much
            times (int): how often
        """
        self.count += amount * times
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count == 10)


def test_trl() -> None:
    played = environment("Counter", max_turns=3)
    (tool,) = played.tools  # type: ignore[attr-defined]
    assert tool["function"] == {
        "name": "add",
        "description": "Adds to the counter.",
        "parameters": {
            "type": "object",
            "properties": {
                "amount": {"type": "integer", "description": "how much"},
                "times": {"type": "integer", "description": "how often"},
            },
            "required": ["amount"],
        },
    }
    assert played.reset([{"prompt": "Count to 10.", "start": 4}], [0]) == ["Count to 10. It is at 4."]
    answered = one(played, "", ToolCall("add", {"amount": 3, "times": 2}, "c1"), ToolCall("sub", {}))
    error = "error: there is no tool 'sub'; there is add"
    assert answered.observation == [
        {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "at 10"},
        {"role": "tool", "name": "sub", "tool_call_id": "", "content": error},
    ]
    assert one(played, "done") == StepResult(reward=1.0, done=True, info={"calls": 2, "call_errors": 1})
    assert played.reset([{"prompt": "Count.", "start": 0}], [0]) == [None]


class Echoing:
    """An environment in the form of NeMo-RL's EnvironmentInterface."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.suffix = cfg["suffix"]

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> Any:
        import numpy as np

        told = [{"role": "environment", "content": log[-1]["content"] + self.suffix} for log in message_log_batch]
        ends = np.array([len(log) >= data["length"] for log, data in zip(message_log_batch, metadata, strict=True)])
        rewards = {"reward/end": ends.astype(float), "reward/turn": np.ones(len(ends))}
        return SimpleNamespace(observations=told, metadata=list(metadata), rewards=rewards, terminateds=ends)


def test_nemo_rl() -> None:
    played = environment("Echoing", suffix="!")
    rows = [{"prompt": "p", "extra_env_info": {"length": length}} for length in (2, 4)]
    assert played.reset(rows, [0, 0]) == [None, None]
    first, second = played.step([Action("a"), Action("b")])
    assert first == StepResult([{"role": "environment", "content": "a!"}], 2.0, True)
    assert second == StepResult([{"role": "environment", "content": "b!"}], 1.0, False)
    first, second = played.step([None, Action("c")])
    assert first is None and second.done


@dataclass
class EchoAction:
    message: str


class EchoObservation:
    """An observation in the form of OpenEnv's pydantic models."""

    def __init__(self, echoed: str, reward: float | None = None, done: bool = False) -> None:
        self.fields = {"echoed": echoed, "reward": reward, "done": done, "metadata": {"length": len(echoed)}}

    def model_dump(self) -> dict[str, Any]:
        return self.fields


class EchoEnvironment:
    """An environment in the form served by OpenEnv."""

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> EchoObservation:
        return EchoObservation(f"seed {seed} {columns.get('topic')}")

    def step(self, action: EchoAction) -> EchoObservation:
        return EchoObservation(action.message, self.reward, action.message == "stop")


EchoEnvironment.step.__annotations__["action"] = EchoAction


def test_openenv_in_this_process() -> None:
    played = environment("EchoEnvironment", make={"reward": 2.0}, reset_columns=["topic"])
    (first,) = played.reset([{"prompt": "Echo.", "topic": "cats"}], [7])
    assert first == 'Echo.\n{"echoed": "seed 7 cats"}'
    assert one(played, '{"message": "stop"}').done
    assert one(played, "hey") == StepResult('{"echoed": "hey"}', 2.0, False, {"length": 3})
    assert one(played, "", ToolCall("echo", {"message": "hi"})).observation == '{"echoed": "hi"}'


def served(message: Mapping[str, Any], played: EchoEnvironment) -> Mapping[str, Any]:
    """Returns the answer of an OpenEnv server."""
    if message["type"] == "reset":
        observation = played.reset(**message["data"])
    else:
        observation = played.step(EchoAction(**message["data"]))
    fields = observation.model_dump()
    return {"observation": {"echoed": fields["echoed"]}, "reward": fields["reward"], "done": fields["done"]}


class HttpHandler(BaseHTTPRequestHandler):
    played = EchoEnvironment()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.removeprefix("/")
        try:
            message = {"type": kind, "data": body["action"] if kind == "step" else body}
            answer, status = served(message, self.played), 200
        except TypeError as error:
            answer, status = {"detail": str(error)}, 422
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


def serve_web_socket(connection: Any) -> None:
    played = EchoEnvironment(reward=3.0)
    for line in connection:
        message = json.loads(line)
        if message["type"] == "close":
            return
        try:
            connection.send(json.dumps({"type": "observation", "data": served(message, played)}))
        except TypeError as error:
            connection.send(json.dumps({"type": "error", "data": {"message": str(error), "code": "VALIDATION_ERROR"}}))


@pytest.fixture(scope="module")
def http_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HttpHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def web_socket_url() -> Iterator[str]:
    from websockets.sync.server import serve

    with serve(serve_web_socket, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("scheme", "reward"), [("http", 1.0), ("ws", 3.0)])
def test_openenv_by_url(scheme: str, reward: float, http_url: str, web_socket_url: str) -> None:
    url = {"http": http_url, "ws": web_socket_url}[scheme]
    played = environment(url, observation_key="echoed", reset_columns=["topic"])
    assert played.reset([{"topic": "dogs"}, {"topic": "cats"}], [1, 2]) == ["seed 1 dogs", "seed 2 cats"]
    results = played.step([Action("hey"), Action("stop")])
    assert results == [StepResult("hey", reward), StepResult("stop", reward, True)]
    with pytest.raises(ConnectionError, match="unexpected keyword argument 'colour'"):
        played.step([Action('{"colour": 1}'), None])
    played.close()


async def counts(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates two turns by ids through slime's own `post`, in the form of slime's generate."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    assert isinstance(sample, Sample) and not args.partial_rollout
    tokenizer = GenerateState(args).tokenizer
    prompt = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    tokens, mask, logprobs = list(prompt), [], []
    for turn in range(args.turns):
        payload = {"input_ids": tokens, "sampling_params": {**sampling_params, "max_new_tokens": 4}}
        output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
        drawn = output["meta_info"]["output_token_logprobs"]
        answer = tokenizer(sample.label, add_special_tokens=False)["input_ids"] if turn == 0 else []
        tokens = [*tokens, *(item[1] for item in drawn), *answer]
        mask += [1] * len(drawn) + [0] * len(answer)
        logprobs += [item[0] for item in drawn] + [0.0] * len(answer)
        sample.response += output["text"]
        sample.update_from_meta_info(args, output["meta_info"])
    sample.tokens, sample.response_length = tokens, len(tokens) - len(prompt)
    sample.loss_mask, sample.rollout_log_probs, sample.reward = mask, logprobs, {"score": 0.5}
    return sample


async def posts_texts(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """Posts the whole text each time and returns several samples, also in slime's form."""
    from slime.utils.http_utils import post

    for more in ("", "+1=", "+2="):
        sample.response += more
        payload = {"text": sample.prompt + sample.response, "sampling_params": {}}
        output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
        sample.response += output["text"]
    sample.remove_sample = True
    return [sample, sample]


class FastTokenizer:
    """A tokenizer with the interface of transformers, without its imports."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __call__(self, text: str, add_special_tokens: bool) -> Mapping[str, Sequence[int]]:
        return {"input_ids": self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}


@pytest.fixture(autouse=True)
def fast_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(slime._TOKENIZERS, str(WARMED_UP), FastTokenizer(WARMED_UP))


def play(function: str, options: Mapping[str, Any], turns: Sequence[Action]) -> tuple[list[TokenIds], StepResult]:
    """Returns the prompts for the engine and the final result."""

    async def played() -> tuple[list[TokenIds], StepResult]:
        factory: dict[str, Any] = {"model_path": str(WARMED_UP), "sampling": {"temperature": 0.7}}
        environment_: Any = environment(function, factory, **options)
        (result,) = await environment_.reset([{"prompt": "1+2=", "label": ",3"}], [0])
        asked = []
        for turn in turns:
            asked.append(result.observation)
            (result,) = await environment_.step([turn])
        return asked, result

    return asyncio.run(played())


def test_slimes_generate() -> None:
    turns = [Action("33", ids=(5, 5), logprobs=(-0.5, -0.25)), Action("4", truncated=True, ids=(6,), logprobs=(-1.0,))]
    asked, end = play("counts", {"turns": 2}, turns)
    sampling = {"temperature": 0.7, "max_new_tokens": 4}
    assert asked == [TokenIds((3, 12, 4, 13), sampling), TokenIds((3, 12, 4, 13, 5, 5, 14, 5), sampling)]
    (trajectory,) = end.trajectories
    assert end.done and end.reward == trajectory.reward == 0.5
    assert (trajectory.ids, trajectory.num_response_tokens) == ((3, 12, 4, 13, 5, 5, 14, 5, 6), 5)
    assert trajectory.loss_mask == (True, True, False, False, True)
    assert trajectory.logprobs == (-0.5, -0.25, 0.0, 0.0, -1.0)
    assert trajectory.status == "truncated" and trajectory.trained_on


def test_texts_are_encoded_behind_the_ids_that_were_drawn() -> None:
    turns = [Action("3", ids=(5, 0), logprobs=(-0.1, -0.1)), Action("4", ids=(6,), logprobs=(-0.1,)), Action("")]
    asked, end = play("posts_texts", {}, turns)
    assert [turn.ids for turn in asked] == [
        (3, 12, 4, 13),
        (3, 12, 4, 13, 5, 0, 12, 3, 13),
        (3, 12, 4, 13, 5, 0, 12, 3, 13, 6, 12, 4, 13),
    ]
    assert len(end.trajectories) == 2 and not end.trajectories[0].trained_on and end.trajectories[0].reward is None


async def reads_what_is_not_there(args: Any, sample: Any, sampling_params: Any) -> None:
    print(args.over_sampling_batch_size)


def test_what_a_function_lacks_is_said() -> None:
    with pytest.raises(AttributeError, match=r"args has no 'over_sampling_batch_size'; set it in env\.options"):
        play("reads_what_is_not_there", {}, [])


def test_turns_of_one_episode_are_drawn_one_after_the_other() -> None:
    async def both() -> list[int]:
        turns = await asyncio.gather(draw([1]), draw([2], {"top_k": 1}))
        return [id_ for turn in turns for id_ in turn.ids]

    async def played() -> tuple[list[TokenIds | None], Any]:
        episode = Episode(both())
        asked: list[TokenIds | None] = []
        while (step := await episode.next())[0] is not None:
            asked.append(step[0])
            episode.answer(Action("", ids=(step[0].ids[0] + 10,)))
        return asked, step[1]

    asked, returned = asyncio.run(played())
    assert asked == [TokenIds((1,)), TokenIds((2,), {"top_k": 1})] and returned == [11, 12]


def test_names_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "my_game.py"
    file.write_text("from tests.support.user_environments import Counting as Game\n")
    for name in (f"{file}:Game", *(f"tests.support.user_environments{mark}Counting" for mark in ":.")):
        assert load_environment(EnvironmentFactory(name))().reset([{"name": "n"}], [1]) == ["hello n 1 of 1"]
    for name, expected in (
        ("no_such_game", "is unknown; expected agent, calculator, guess_number, python, "),
        (f"{tmp_path}/other.py:Game", "there is no file"),
        (f"{file}:Play", "has no function 'Play'"),
    ):
        with pytest.raises(ConfigError, match="^env.function: ") as error:
            load_environment(EnvironmentFactory(name))
        assert expected in str(error.value)


def test_nothing_is_recognised_by_two_conventions() -> None:
    """Otherwise the order of the registry would matter."""
    from tests.support import user_environments

    things: list[Any] = [SearchEnvironment, Counter, Echoing, EchoEnvironment, counts, Corridor]
    things += [user_environments.Counting, user_environments.Misbehaving, user_environments.Awaiting]
    for thing in things:
        knowing = [convention for convention in worker.CONVENTIONS if convention.recognises(thing)]
        assert len(knowing) == 1, f"{thing} is {knowing}"


def test_the_pages_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/environments.md has at most 40 lines, with rows and config."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```(?:python|json|yaml)\n(.*?)```", page, re.DOTALL)
    code, rows, _, trial, *_ = blocks
    assert sum(len(block.splitlines()) for block in blocks[:3]) <= 40
    (tmp_path / "spelling.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    row = json.loads(rows.splitlines()[0])
    played = load_environment(EnvironmentFactory("spelling.py:Backwards", {"reward_per_letter": 0.2}))()
    assert played.reset([row], [0]) == ["Spell 'house' backwards, one letter a turn."]
    results = [one(played, letter) for letter in "esuoh"]
    assert [result.done for result in results] == [False] * 4 + [True]
    assert sum(result.reward for result in results) == pytest.approx(2.0)
    exec(compile(trial, "<the page>", "exec"), {})


DOWN, RIGHT = 1, 2
WAY_OVER_THE_LAKE = (DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT)


def test_frozen_lake_is_won_by_numbers() -> None:
    lake = environment("gymnasium:FrozenLake-v1", make={"is_slippery": False})
    (first,) = lake.reset([{}], [0])
    assert first == "[S]FFF\nFHFH\nFFFH\nHFFG\nAnswer with a number from 0 to 3."
    results = [one(lake, f"I take {action}.") for action in WAY_OVER_THE_LAKE]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[0].observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert sum(result.reward for result in results) == 1.0
    lake.close()


def test_frozen_lake_is_lost_by_names() -> None:
    names = ["left", "down", "right", "up"]
    lake = environment("gymnasium:FrozenLake-v1", make={"is_slippery": False}, action_names=names)
    (first,) = lake.reset([{"prompt": "You are on a lake."}], [0])
    assert str(first).startswith("You are on a lake.\n[S]FFF")
    assert not one(lake, "not left but Down").done
    lost = one(lake, "right")
    assert (lost.done, lost.reward) == (True, 0.0)


def test_what_is_no_action_is_asked_for_again_or_ends_the_episode() -> None:
    lake = environment("gymnasium:FrozenLake-v1")
    lake.reset([{}], [0])
    for text in ("nowhere", "7", "-1", "1.5"):
        assert one(lake, text) == StepResult("Answer with a number from 0 to 3.", info={"invalid_actions": 1})
    strict = environment("gymnasium:FrozenLake-v1", on_invalid="end")
    strict.reset([{}], [0])
    assert one(strict, "nowhere").done


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_a_batch_is_one_vector_environment(vectorization: str) -> None:
    poles = environment("gymnasium:CartPole-v1", vectorization=vectorization)
    seeds_each = vectorization == "sync"
    first = poles.reset([{}, {}, {"seed": 1}], [1, 2, 3])
    numbers = [list(map(float, re.findall(r"-?\d[\d.e-]*", str(text).splitlines()[0]))) for text in first]
    assert [len(state) for state in numbers] == [4, 4, 4]
    assert (first[0] == first[2]) == seeds_each and first[0] != first[1]
    results = step_each(poles, "0", "pass", "0")
    assert (results[0] == results[2]) == seeds_each and results[0].reward == 1.0
    assert results[1].done, "a vector environment cannot wait for one of its episodes"
    for _ in range(30):
        results = step_each(poles, "0", None, "1")
        if results[0].done:
            break
    assert results[1] is None and not results[2].done, "the pole falls if it is pushed to one side"
    again = poles.reset([{}] * 3, [1, 2, 1])
    assert again == first
    assert len(poles.reset([{}], [1])) == 1, "the last batch may be smaller"
    poles.close()


def test_numbers_are_actions_where_a_space_has_them() -> None:
    pendulum = environment("gymnasium:Pendulum-v1")
    (first,) = pendulum.reset([{}], [3])
    assert str(first).endswith("\nAnswer with 1 numbers.")
    assert one(pendulum, "I push with -1.5").observation != first
    assert one(pendulum, "9").info == {"invalid_actions": 1}, "beyond the space's bounds"


def shout(observation: Any) -> str:
    return f"AT {observation}!"


def read_backwards(text: str) -> int | None:
    return int(text[::-1]) if text.isdigit() else None


class Corridor:
    """An environment in the form of gymnasium.Env, without gymnasium."""

    metadata = {"render_modes": []}

    def __init__(self, length: int = 2) -> None:
        self.length = length
        self.action_space = type("Choice", (), {"n": 11})()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.place = (options or {}).get("place", 0)
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += action
        return self.place, 0.5, self.place >= self.length, False, {"place": self.place, "what": object()}

    def close(self) -> None: ...


def test_a_users_class_with_functions_of_the_user() -> None:
    names = {"render": f"{__name__}:shout", "parse": f"{__name__}:read_backwards"}
    corridor = environment("Corridor", make={"length": 12}, **names)
    (first,) = corridor.reset([{"prompt": [{"role": "user", "content": "Go."}], "reset_options": {"place": 1}}], [0])
    assert first == [{"role": "user", "content": "Go."}, {"role": "user", "content": "AT 1!"}]
    assert one(corridor, "01") == StepResult("AT 11!", 0.5, False, {"invalid_actions": 0, "place": 11})
    assert one(corridor, "1").done


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        ("gymnasium:NoSuchThing-v1", {}, "env.function: 'gymnasium:NoSuchThing-v1': Environment `NoSuchThing`"),
        ("gymnasium:CartPole-v1", {"colour": 1}, "env.options: colour unknown; expected one of make, vectorization"),
        ("gymnasium:CartPole-v1", {"parse": "nowhere:f"}, "env.options.parse: 'nowhere:f': cannot import nowhere"),
    ],
)
def test_refusals(function: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        environment(function, **options)


def test_texts_of_observations() -> None:
    import numpy as np

    assert observation_text(np.float32(0.12345678)) == "0.1235"
    assert observation_text({"a": np.arange(3), "b": (1, np.array([0.5]))}) == "a: 0, 1, 2\nb: 1, 0.5"
    assert observation_text(np.eye(2)) == "1, 0\n0, 1"
    assert without_colours("a\x1b[41mb\x1b[0mc\n") == "a[b]c"
    parse = default_parse(type("Choice", (), {"n": 3, "start": 5})())
    assert [parse(text) for text in ("5", "from 6 to 7", "8", "")] == [5, 7, None, None]
