"""Tests of judges and reward models: their questions, and the scores from their answers."""

import asyncio
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.errors import CheckpointError, ConfigError
from rltrain.models.checkpoint_model import require_classifier
from rltrain.planning.validation import check_config
from rltrain.rewards import judge
from rltrain.rewards.answers import Answer, Scorable
from rltrain.rewards.functions import Wants, await_calls, load_reward
from rltrain.rewards.scorer import (
    NoVerdictError,
    Question,
    RewardingModel,
    Scorer,
    Scores,
    rewarding_models,
    verdict_parser,
)
from rltrain.roles.scoring_models import OwnText, UnreadableTextError
from tests.forked.popen import REPOSITORY
from tests.support.one_function import OneFunction
from tests.support.schedule_configs import NO_EVALUATION, make_config, order_of

Reply = tuple[int, Any]
"""A status and a body. Bytes are sent unchanged, other values as JSON."""


class Serving:
    """An HTTP server with its posted bodies and their headers."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply]) -> None:
        self.answer = answer
        self.posted: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.lock = threading.Lock()
        self.url = ""

    def reply(self, headers: Any, body: bytes) -> Reply:
        with self.lock:
            self.posted.append(json.loads(body))
            self.headers.append(headers)
            number = len(self.posted)
        return self.answer(self.posted[number - 1], number)


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Reply]) -> Iterator[Serving]:
    """Serves `answer(posted body, number of the request from 1)`."""
    state = Serving(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, content = state.reply(self.headers, self.rfile.read(int(self.headers["content-length"])))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", "http://elsewhere.invalid/score")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *request: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # the client has stopped waiting
                super().handle_error(*request)

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}/score"
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.001)


SAMPLE = Scorable("2+2?", "4", "four", messages=({"role": "user", "content": "2+2?"},), row={"level": 3})


def judged(url: str, *, retries: int = 3, timeout_s: float = 20.0, **options: Any) -> Answer:
    function = load_reward(schema.Reward(function=url, options=options, retries=retries, timeout_s=timeout_s))
    ((answer,),) = asyncio.run(await_calls(function, [[SAMPLE]], function.limit_s(timeout_s)))
    return answer


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (0.5, Answer(0.5)),
        (True, Answer(1.0)),
        ({"score": 2}, Answer(2.0)),
        ({"reward": 2, "clarity": 0.25, "why": "good"}, Answer(2.0, metrics={"clarity": 0.25})),
    ],
)
def test_what_a_judge_may_answer(content: Any, answer: Answer) -> None:
    with serving(lambda posted, number: (200, content)) as server:
        assert judged(server.url) == answer


def test_what_a_judge_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with serving(lambda posted, number: (200, 1)) as server:
        judged(server.url, token_env="JUDGE_TOKEN", payload={"rubric": "exact"})
    assert server.posted == [
        {
            "prompt": "2+2?",
            "response": "4",
            "label": "four",
            "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "row": {"level": 3},
            "rubric": "exact",
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_judge_that_is_busy_is_asked_again(status: int) -> None:
    with serving(lambda posted, number: (status, "busy") if number < 3 else (200, 1)) as server:
        assert judged(server.url, retries=2) == Answer(1.0)
    with serving(lambda posted, number: (status, "busy")) as server:
        assert judged(server.url, retries=2) == Answer(error=f'{server.url}, asked 3 times, answered {status}: "busy"')
        assert len(server.posted) == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((404, "no such path"), 'answered 404: "no such path"'),
        ((307, ""), "redirects to http://elsewhere.invalid/score, but redirects are not followed; set reward.function"),
        ((200, b"<html>"), "answered '<html>'; expected JSON: a number, or"),
        ((200, {"points": 1}), "expected JSON: a number, or"),
        ((200, {"score": "high"}), "returned str 'high' under 'score'; expected a number"),
        ((200, {"score": None}), "returned NoneType None under 'score'; expected a number"),
    ],
)
def test_what_is_wrong_is_told_and_not_asked_again(reply: Reply, reason: str) -> None:
    with serving(lambda posted, number: reply) as server:
        assert reason in str(judged(server.url).error)
        assert len(server.posted) == 1


def test_a_judge_that_cannot_be_reached() -> None:
    with serving(lambda posted, number: (200, 1)) as server:
        gone = server.url
    reason = str(judged(gone, retries=1).error)
    assert reason.startswith(f"{gone}, asked 2 times, cannot be reached (ConnectError")
    assert str(judged(gone, retries=0).error).startswith(f"{gone}, asked once, cannot be reached")


def test_a_judge_that_takes_too_long_costs_its_sample() -> None:
    end = threading.Event()

    def slow(posted: dict[str, Any], number: int) -> Reply:
        if posted["response"] == "slow":
            end.wait(60)
        return 200, 1

    with serving(slow) as server:
        function = load_reward(schema.Reward(function=server.url))
        with OneFunction(function, timeout_s=1, num_workers=4, retries=1) as scorer:
            scores = scorer.score([Scorable("p", text, "l") for text in ("a", "slow", "b")])
        end.set()
    assert scores == Scores([1.0, 0.0, 1.0], num_errors=0, num_timeouts=1)
    assert scores.first_failure is not None and "took longer than reward.timeout_s = 1" in scores.first_failure
    assert "Traceback" not in scores.first_failure


def test_as_many_requests_are_on_their_way_as_there_are_workers() -> None:
    """All requests come from one process."""
    meeting = threading.Barrier(3, timeout=60)

    def answer(posted: dict[str, Any], number: int) -> Reply:
        meeting.wait()
        return 200, 1

    with serving(answer) as server:
        function = load_reward(schema.Reward(function=server.url))
        with OneFunction(function, timeout_s=60, num_workers=3) as scorer:
            assert scorer.score([Scorable("p", str(n), "l") for n in range(6)]).rewards == [1.0] * 6
            assert len(scorer._workers[0].processes) == 1


def test_pauses_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.5)
    patient = judge.RemoteJudge("http://x", timeout_s=10, retries=8)
    assert patient.longest_s == 9 * 10 + (0.5 + 1 + 2 + 4 + 8 + 16 + 30 + 30)


PLACED = {"actor": 0, "rollout, reward": 1, "reward_model": 2, "judge": 3}
MODELS = {"reward_model": {"path": "rm"}, "judge": {"path": "j", "prompt": "{response}?"}}
SAMPLES = [Scorable("", text, "a") for text in ("a", "b", "a")]


def model(title: str = "model", weight: float = 1.0) -> RewardingModel:
    return RewardingModel("reward_model", title, weight, "a/path", Wants())


def test_the_reward_is_the_weighted_sum_of_functions_and_models() -> None:
    models = [model(weight=2.0), model("judge", -1.0)]
    with Scorer.of(schema.Reward(), models=models) as scorer:
        told = [models[0].scores([0.5, math.nan, -1.0]), models[1].scores([0.0, 3.0, math.inf])]
        scores = scorer.score(SAMPLES, told)
    assert scores.rewards == [2.0, -3.0, -1.0]
    assert list(scores.by_function) == ["exact_match", "model", "judge"], "next to models, a function has a name too"
    assert [of.num_errors for of in scores.by_function.values()] == [0, 1, 1]
    assert scores.by_function["model"].rewards == [0.5, 0.0, -1.0], "unscored samples get 0"


def test_a_model_may_be_all_there_is() -> None:
    with Scorer.of(schema.Reward(functions=()), models=[model()]) as scorer:
        assert scorer.score(SAMPLES, [model().scores([1.0, 2.0, 3.0])]).rewards == [1.0, 2.0, 3.0]
        assert scorer.score([], [model().scores([])]).rewards == []


def names_of_functions(**reward: Any) -> tuple[str, ...]:
    return make_config(placement=PLACED, **MODELS, **({"reward": reward} if reward else {})).reward.names


def test_where_a_model_is_placed_functions_are_those_that_are_named() -> None:
    assert names_of_functions() == names_of_functions(timeout_s=3.0) == ()
    assert names_of_functions(function="math") == ("math",)
    assert make_config().reward.names == ("exact_match",)
    check_config(make_config(placement=PLACED, **MODELS))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward_model": {}}, "reward_model.path: got null, but placement has role reward_model"),
        ({"judge": {"path": "j"}}, "judge.prompt: got null; expected the question to the judge"),
        ({"placement": {"actor, rollout, reward": 0}}, "no role judge is placed; expected judge: ranks in placement"),
        ({"reward_model": {"path": "m", "name": "judge"}}, "reward: 2 are called 'judge'"),
        (
            {"reward_model": {"path": "m", "name": "math"}, "reward": {"function": "math"}},
            "reward: 2 are called 'math'",
        ),
        ({"reward_model": {"path": "m", "name": "mean"}}, "reward_model.name: got 'mean'; expected letters"),
        ({f: MODELS[f] | {"weight": 0.0} for f in MODELS}, "reward: every weight is 0"),
        ({"judge": MODELS["judge"] | {"parallel": {"pp": 2}}}, "judge.parallel.pp: got 2; expected 1"),
        (
            {"judge": MODELS["judge"] | {"engine": "sglang", "kv_cache_gb": 3}},
            "judge.kv_cache_gb: got 3.0 with judge.engine sglang; expected auto",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(make_config(**{"placement": PLACED, **MODELS, **sections}))


def test_a_reward_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.functions: got none, and no model scores responses"):
        check_config(make_config(reward={"functions": []}))


def test_models_say_what_they_have_to_before_the_reward_asks() -> None:
    order = order_of(steps=1, placement=PLACED, **MODELS, **NO_EVALUATION)
    tasks = [entry.name for entry in order if entry.kind == "task"]
    assert tasks[1:5] == ["generate", "model_scores", "verdicts", "score"]
    waits = [entry.name for entry in order if entry.kind == "wait" and entry.roles[1] == "reward"]
    assert waits == ["model_scores", "verdicts", "samples"]


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures is .* expected a classifier"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "id2label is absent; expected one label"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "not 2"),
    ],
)
def test_a_reward_model_gives_one_score(tmp_path: Any, says: dict[str, Any], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(says))
    with pytest.raises(CheckpointError, match=expected):
        require_classifier(tmp_path, "reward_model.path")


class TestQuestion:
    def test_it_shows_what_it_names(self) -> None:
        question = Question('{prompt} {response} {label} {source} {{response}} {"score": 1}')
        assert question.takes_label and question.columns.required == {"source"}
        asked = question.of(Scorable("1+1", "2 {label}", "two", row={"source": "sums"}))
        assert asked == '1+1 2 {label} two sums {response} {"score": 1}'

    def test_of_a_conversation_it_shows_all_turns(self) -> None:
        turns = [{"message": {"role": "assistant", "content": text}, "replies": [], "reward": 0.0} for text in "ab"]
        question = Question("{conversation}")
        assert {"messages", "turns"} <= question.fields and not question.takes_label
        assert question.of(Scorable("q", "ab", "", turns=turns)) == "user: q\n\nassistant: a\n\nassistant: b"

    def test_a_text_without_fields_is_a_file(self, tmp_path: Any) -> None:
        (tmp_path / "question.txt").write_text("Is {response} right?")
        assert Question(str(tmp_path / "question.txt")).of(Scorable("", "2", "")) == "Is 2 right?"
        with pytest.raises(ConfigError, match="is not a readable file"):
            Question("Is it right?")
        with pytest.raises(ConfigError, match="the judge must see the response"):
            Question("Is {prompt} hard?")

    @given(st.text(), st.text())
    def test_nothing_in_a_sample_is_taken_for_a_field(self, prompt: str, response: str) -> None:
        assert Question("{prompt}|{response}").of(Scorable(prompt, response, "")) == f"{prompt}|{response}"


class TestVerdict:
    @pytest.mark.parametrize(
        ("answer", "number"),
        [("7", 7), ("It is 3 of 10.\nScore: 7/10", 10), ("-0.5 points", -0.5), ("none", None), ("", None)],
    )
    def test_by_default_it_is_the_last_number(self, answer: str, number: float | None) -> None:
        assert told(schema.Judge(), answer) == number

    def test_the_last_match_of_an_expression_counts(self) -> None:
        settings = schema.Judge(verdict=r"\[\[(\d+)\]\]")
        assert told(settings, "[[1]] or rather [[4]], 9") == 4
        assert told(settings, "9") is None

    def test_a_function_may_read_it(self) -> None:
        settings = schema.Judge(verdict="tests.unit.test_judges:length")
        assert told(settings, "abc") == 3
        for answer in ("raise", "none", "infinity"):
            assert told(settings, answer) is None

    @pytest.mark.parametrize("verdict", ["(", r"(\d)(\d)", "nowhere:function", "nothing"])
    def test_what_reads_nothing_is_refused(self, verdict: str) -> None:
        with pytest.raises(ConfigError, match="judge.verdict"):
            verdict_parser(schema.Judge(verdict=verdict))


def told(settings: schema.Judge, answer: str) -> float | None:
    try:
        return verdict_parser(settings)(answer)
    except NoVerdictError:
        return None


def length(answer: str) -> float | None:
    """A user's function."""
    if answer == "raise":
        raise KeyError(answer)
    return {"none": None, "infinity": math.inf}.get(answer, float(len(answer)))


def test_models_are_known_by_their_roles() -> None:
    config = make_config(placement=PLACED, **MODELS)
    found = rewarding_models(config, ("reward", "reward_model", "judge"))
    assert [(of.title, of.transfer("samples"), of.transfer("evaluation_samples")) for of in found] == [
        ("model", "model_scores", "evaluation_model_scores"),
        ("judge", "verdicts", "evaluation_verdicts"),
    ]


SAID = [{"role": "assistant", "content": "3"}]
REFUSES = "{{ raise_exception('only one message') }}"
SHOWS = "{% for m in messages %}{{ m.content }}={% endfor %}{% if add_generation_prompt %}+{% endif %}"


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """Returns a function that makes the text of a template and vocabulary."""

    def make(template: str | None = None, vocab_size: int = 1000, chat_template: str = "auto") -> OwnText:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "tests/warmed_up")
        tokenizer.chat_template = template
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        tokenizer.save_pretrained(folder)
        return OwnText(folder, "judge.path", vocab_size=vocab_size, chat_template=chat_template)

    return make


def test_a_template_writes_the_whole_conversation(own: Any) -> None:
    text = own(SHOWS)
    ids = text.ids("1+2", [], SAID)
    assert text.tokenizer.decode(ids).replace(" ", "") == "1+2=3="
    asked = text.ids("unused", [{"role": "system", "content": "9"}, {"role": "user", "content": "1+2"}], SAID)
    assert text.tokenizer.decode(asked).replace(" ", "") == "9=1+2=3="
    assert text.tokenizer.decode(text.question_ids("3")).replace(" ", "") == "3=+"


@pytest.mark.parametrize("template", [None, SHOWS])
def test_without_a_template_texts_stand_one_after_the_other(own: Any, template: str | None) -> None:
    text = own(template, chat_template="never")
    assert text.ids("1+2=", [], SAID) == list(text.tokenizer("1+2=3")["input_ids"])
    assert text.question_ids("1+2=") == list(text.tokenizer("1+2=")["input_ids"])


def test_what_cannot_be_read_is_told(own: Any, tmp_path: Path) -> None:
    with pytest.raises(UnreadableTextError, match="refuses the conversation: only one message"):
        own(REFUSES).ids("1", [], SAID)
    with pytest.raises(UnreadableTextError, match="refuses the question: only one message"):
        own(REFUSES).question_ids("1")
    with pytest.raises(UnreadableTextError, match="and the model's vocabulary has 2"):
        own(vocab_size=2).ids("1", [], SAID)
    with pytest.raises(UnreadableTextError, match="the text has no token"):
        own().ids("", [], [])
    with pytest.raises(CheckpointError, match="judge.path: there is no folder"):
        OwnText(tmp_path / "nowhere", "judge.path", vocab_size=9, chat_template="auto")


def test_a_text_may_be_made_to_end_with_eos(own: Any) -> None:
    text = own()
    eos = text.eos
    assert text.up_to_eos([5, 6]) == [5, 6, eos]
    assert text.up_to_eos([5, eos, 6, eos, 7, 8]) == [5, eos, 6, eos]
    assert text.up_to_eos([5, eos]) == [5, eos]
    text.tokenizer.eos_token = None
    with pytest.raises(CheckpointError, match="judge.path: the tokenizer has no eos_token"):
        text.up_to_eos([5])


def test_an_answer_ends_as_the_tokenizer_says(own: Any) -> None:
    text = own(SHOWS)
    assert text.tokenizer.eos_token_id in text.end_tokens
