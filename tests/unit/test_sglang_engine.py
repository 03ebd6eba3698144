"""The engine with an SGLang server: samples, updates, suspension, restarts."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rltrain.config.schema import SGLang
from rltrain.data.experience import SIBLINGS_APART
from rltrain.errors import ConfigError, DataError, DivergenceError, EngineError, SyncError
from rltrain.models.vision import PlacedImage
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.remote_engine import DivergenceWatch
from rltrain.rollout.servers.server_images import ServerImages
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.runtime.image_files import ImageStore
from tests.support.sglang_server import (
    IMAGE_TOKEN,
    UNSEEN_EOS,
    FakeDelivery,
    FakeServer,
    expected_tokens,
    logprob_of,
    next_token,
)

GREEDY = SamplingParams(0.0, 1.0, 0, 16, ())
STOPPING = SamplingParams(1.0, 1.0, 0, 16, (3, 4, 5, 6))
LONG = SamplingParams(1.0, 1.0, 0, 400, ())
LIMIT_S = 20.0


class LetterTokenizer:
    """A tokenizer with one letter per token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def engine_on(server: FakeServer, *, slots: int, limit_s: float = 2.0, delivery: Any = None, **options: Any) -> Any:
    """Returns an engine with the server. `delivery` makes the delivery of weights from the engine's client."""
    client = Client(limit_s=limit_s)
    made = delivery(client) if delivery else FakeDelivery(client)
    defaults = {"max_context_tokens": 500, "settings": SGLang(), "advance": lambda: None}
    return SGLangEngine(server, client, made, group=None, max_running_requests=slots, **defaults | options)


class Rig:
    """An engine, its stand-in server, and the engine's reports during a start."""

    def __init__(self, *, max_running_requests: int = 64, max_context_tokens: int = 500, **options: object) -> None:
        settings = {"hang_timeout_s": 5.0, "max_restarts": 2}
        tokenizer, seeded = options.pop("tokenizer", None), options.pop("seeded", False)
        images = options.pop("images", None)
        settings |= {name: options.pop(name) for name in [*options] if name in SGLang.model_fields}
        self.server = FakeServer(**options)
        self.num_advances = 0
        self.engine = engine_on(
            self.server,
            slots=max_running_requests,
            max_context_tokens=max_context_tokens,
            settings=SGLang(**settings),
            advance=self._advance,
            tokenizer=tokenizer,
            seeded=seeded,
            images=images,
        )
        self.engine.start()

    def _advance(self) -> None:
        self.num_advances += 1

    def sync(self, version: int) -> SGLangEngine:
        self.engine.begin_update()
        self.engine.end_update(version)
        return self.engine


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs. Their weights have version 0 by default."""
    rigs: list[Rig] = []

    def make(*, version: int | None = 0, **options: object) -> Rig:
        rigs.append(Rig(**options))
        if version is not None:
            rigs[-1].sync(version)
        return rigs[-1]

    yield make
    for one in rigs:
        one.engine.close()
        assert one.server.broken == [], "a request broke a rule of SGLang"


def requests(count: int = 9, first: int = 0) -> list[Sample]:
    return [Sample(100 + i, tuple(range(1, 2 + i)), seed=i) for i in range(first, first + count)]


def drain(engine: SGLangEngine) -> dict[int, Sample]:
    completions: dict[int, Sample] = {}
    deadline = time.monotonic() + LIMIT_S
    while engine.num_unfinished:
        assert time.monotonic() < deadline, f"{engine.num_unfinished} unfinished"
        completions |= {done.id: done for done in engine.step()}
    return completions


def wait_for(condition: Callable[[], object], step: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        step()
        time.sleep(0.001)


def assert_follows_the_model(request: Sample, done: Sample) -> None:
    """Asserts that every token and log-prob are those of the model with the recorded version."""
    assert len(done.tokens) == len(done.logprobs) == len(done.policy_versions)
    for place, (token, version) in enumerate(zip(done.tokens, done.policy_versions, strict=True)):
        assert token == next_token([*request.prompt, *done.tokens[:place]], version)
        assert done.logprobs[place] == pytest.approx(logprob_of(token, version))


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, STOPPING, replace(LONG, max_response_tokens=150)])
def test_completions_are_what_the_server_drew(rig, sampling: SamplingParams, cumulative: bool) -> None:  # type: ignore[no-untyped-def]
    engine = rig(version=3, cumulative=cumulative).engine
    completions = engine.generate(requests(), sampling)
    assert [done.id for done in completions] == [request.id for request in requests()]
    for request, done in zip(requests(), completions, strict=True):
        assert list(done.tokens) == expected_tokens(request, sampling, version=3)
        assert list(done.policy_versions) == [3] * len(done.tokens)
        assert_follows_the_model(request, done)
        stopped = done.tokens[-1] in sampling.stop_token_ids
        assert done.status == (Status.STOPPED if stopped else Status.TRUNCATED)
    assert engine.num_unfinished == 0
    if sampling is STOPPING:
        assert {done.status for done in completions} == {Status.STOPPED, Status.TRUNCATED}


def test_what_the_server_is_asked_for(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(seeded=True)
    one.engine.generate([Sample(1, (1, 2), seed=77)], SamplingParams(0.7, 0.9, 5, 16, (3,)))
    one.engine.generate([Sample(1, (1, 2), seed=78)], SamplingParams(0.0, 1.0, 0, 16, ()))
    first, second = (body["sampling_params"][0] for path, body in one.server.calls if path == "/generate")
    assert (first["temperature"], first["top_p"], first["top_k"], first["sampling_seed"]) == (0.7, 0.9, 5, 77)
    assert (first["stop_token_ids"], first["ignore_eos"]) == ([3], False)
    assert (second["temperature"], second["top_k"], second["ignore_eos"]) == (0.0, -1, True)
    places = SamplingParams(0.7, 0.9, 5, 16, (3,), greedy=GreedyPlaces(1, 3))
    one.engine.generate([Sample(number, (1, 2), seed=number) for number in (4, 5, SIBLINGS_APART + 5)], places)
    asked = next(body for path, body in reversed(one.server.calls) if path == "/generate")["sampling_params"]
    assert [fields["temperature"] for fields in asked] == [0.7, 0.0, 0.0]
    unseeded = rig()
    unseeded.engine.generate(requests(1), GREEDY)
    [body] = [body for path, body in unseeded.server.calls if path == "/generate"]
    assert "sampling_seed" not in body["sampling_params"][0]
    assert body["return_logprob"] is True


def test_no_more_is_sent_than_runs_at_once_and_the_first_come_first(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(max_running_requests=3)
    everything = requests(12)
    assert one.engine.num_free_slots == 3
    one.engine.submit(everything[:2], GREEDY)
    assert (one.engine.num_free_slots, one.engine.num_unfinished) == (1, 2)
    one.engine.submit(everything[2:], GREEDY)
    assert (one.engine.num_free_slots, one.engine.num_unfinished) == (0, 12)
    completions = drain(one.engine)
    assert len(completions) == 12
    assert one.server.most_running == 3
    sent = [tuple(ids) for path, body in one.server.calls if path == "/generate" for ids in body["input_ids"]]
    places = [sent.index(request.prompt) for request in everything]
    assert all(abs(place - number) < 3 for number, place in enumerate(places)), (
        "only samples that start together may change places"
    )


def test_an_eos_token_of_the_server_that_the_request_does_not_name_ends_nothing(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig()
    script = [7, UNSEEN_EOS, 8, UNSEEN_EOS, 3]
    one.server.draw = lambda context, version: (script[len(context) - 2], -1.0)
    [done] = one.engine.generate([Sample(1, (1, 2), 0)], STOPPING)
    assert list(done.tokens) == script
    assert done.status == Status.STOPPED
    assert len(done.logprobs) == len(done.policy_versions) == 5
    one.server.draw = lambda context, version: (UNSEEN_EOS, -1.0)
    [done] = one.engine.generate([Sample(1, (1, 2), 0)], replace(STOPPING, max_response_tokens=3))
    assert (list(done.tokens), done.status) == ([UNSEEN_EOS] * 3, Status.TRUNCATED)


def test_limits_count_context_and_tokens_drawn_before(rig) -> None:  # type: ignore[no-untyped-def]
    engine = rig(max_context_tokens=14).engine
    everything = requests(5)
    assert [len(done.tokens) for done in engine.generate(everything, GREEDY)] == [13, 12, 11, 10, 9]
    everything = [request.drawn((9,) * 6, (-0.5,) * 6, (8,) * 6) for request in everything]
    for done in engine.generate(everything, GREEDY):
        assert len(done.tokens) == 14 - len(everything[done.id - 100].prompt)
        assert done.tokens[:6] == (9,) * 6
        assert done.logprobs[:6] == (-0.5,) * 6
        assert list(done.policy_versions) == [8] * 6 + [0] * (len(done.tokens) - 6)
        assert done.status == Status.TRUNCATED


def test_a_further_turn_is_sent_whole_and_finds_what_the_server_kept(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=3, tokenizer=LetterTokenizer())
    answer = (9, 8, 7)
    sampling = replace(GREEDY, stop=(LetterTokenizer().decode(answer),))
    [first] = one.engine.generate([Sample(1, (1, 2), 0, turn_limit=5, goes_on=True)], sampling)
    [second] = one.engine.generate([first.observed(answer, turn_limit=12)], sampling)
    bodies = [body for path, body in one.server.calls if path == "/generate"]
    assert [body["input_ids"] for body in bodies] == [[[1, 2]], [[*first.context, *answer]]]
    assert one.server.cache_keys[0] == one.server.cache_keys[1]
    assert (second.turns, second.status) == ((5, 12), Status.TRUNCATED), "observed tokens end no turn"
    assert second.loss_mask == (*[True] * 5, *[False] * 3, *[True] * 4)
    assert second.policy_versions == (*[3] * 5, *[0] * 3, *[3] * 4)
    context = [*first.context, *answer]
    for token in second.tokens[8:]:
        assert token == next_token(context, version=3)
        context.append(token)
    one.sync(4)
    one.engine.generate([second.observed(answer, turn_limit=16)], sampling)
    assert one.server.cache_keys[2] != one.server.cache_keys[1], "keys and values of other weights must not be found"


@pytest.mark.parametrize("num_tokens", [0, 20, 21])
def test_prompts_that_leave_no_room_are_refused(rig, num_tokens: int) -> None:  # type: ignore[no-untyped-def]
    engine = rig(max_context_tokens=20).engine
    with pytest.raises(DataError, match=rf"sample 4 has {num_tokens} tokens.*rollout\.max_context_tokens = 20"):
        engine.generate([Sample(4, (1,) * num_tokens, 0)], GREEDY)
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: ([replace(r[3], id=r[0].id)], LONG), "equal ids"),
        (lambda r: ([r[3], r[3]], LONG), "equal ids"),
        (lambda r: ([r[3]], GREEDY), "unfinished"),
        (lambda r: ([r[3].drawn((1,) * 400, (0.0,) * 400, (0,) * 400)], LONG), "fewer than 400"),
    ],
)
def test_a_refused_submission_queues_nothing(rig, change, message: str) -> None:  # type: ignore[no-untyped-def]
    engine = rig().engine
    engine.submit(requests(2), LONG)
    with pytest.raises(ValueError, match=message):
        engine.submit(*change(requests(5)))
    assert set(drain(engine)) == {100, 101}


def test_stop_strings_need_a_tokenizer(rig) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop"):
        rig().engine.generate(requests(1), replace(GREEDY, stop=("end",)))


@pytest.mark.parametrize("split", [0, 3, 4, 5])
def test_a_stop_string_is_found_where_the_server_does_not_look(rig, split: int) -> None:  # type: ignore[no-untyped-def]
    """Earlier tokens are part of the prompt for the server. It expects the fewest tokens that can spell the string."""
    engine = rig(tokenizer=LetterTokenizer()).engine
    request = requests(1)[0]
    tokens = expected_tokens(request, GREEDY)
    stop = LetterTokenizer().decode(tokens[3:6])
    assert LetterTokenizer().decode(tokens).index(stop) == 3
    begun = request.drawn(tokens[:split], (-1.0,) * split, (0,) * split)
    [done] = engine.generate([begun], replace(GREEDY, stop=(stop,)))
    assert list(done.tokens) == tokens[:6]
    assert len(done.logprobs) == len(done.policy_versions) == 6
    assert done.status == Status.STOPPED


def test_stepping_needs_weights(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=None)
    assert one.engine.policy_version is None
    with pytest.raises(SyncError):
        one.engine.step()
    with pytest.raises(SyncError):
        one.engine.generate(requests(1), GREEDY)
    one.engine.submit(requests(2), GREEDY)
    engine = one.sync(4)
    assert engine.policy_version == 4
    assert {tuple(done.policy_versions) for done in drain(engine).values()} == {(4,) * 16}
    assert engine.step() == []
    engine.begin_update()
    with pytest.raises(SyncError):
        engine.step()


def test_generate_and_release_need_an_idle_engine(rig) -> None:  # type: ignore[no-untyped-def]
    engine = rig().engine
    engine.submit(requests(2), LONG)
    with pytest.raises(ValueError, match=r"generate with 2 samples unfinished.*suspend"):
        engine.generate(requests(2, first=4), LONG)
    with pytest.raises(ValueError, match=r"release_cache with 2 samples unfinished.*suspend"):
        engine.release_cache()
    drain(engine)
    engine.release_cache()
    engine.submit(requests(2), GREEDY)  # other sampling parameters are legal without unfinished samples


def test_suspended_responses_go_on_where_they_stopped(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(pace_s=0.003, max_running_requests=6)
    everything, sampling = requests(), replace(LONG, max_response_tokens=60)
    one.engine.submit(everything, sampling)
    wait_for(lambda: one.server.num_running == 6, one.engine.step)
    time.sleep(0.06)
    suspended = one.engine.suspend()
    assert (one.engine.num_unfinished, one.engine.num_free_slots) == (0, 6)
    assert [request.id for request in suspended] == [request.id for request in everything]
    assert all(request.tokens for request in suspended[:6]) and not any(request.tokens for request in suspended[6:])
    one.engine.release_cache()
    for request, done in zip(everything, one.engine.generate(suspended, sampling), strict=True):
        assert list(done.tokens) == expected_tokens(request, sampling)
        assert_follows_the_model(request, done)


def test_others_go_on_where_some_responses_are_taken_back(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(pace_s=0.003, max_running_requests=6)
    everything, sampling, wanted = requests(), replace(LONG, max_response_tokens=150), {101, 103, 108}
    one.engine.submit(everything, sampling)
    wait_for(lambda: any(sample.tokens for sample in one.engine.progress(wanted)), one.engine.step)
    taken = one.engine.withdraw(wanted)
    assert [sample.id for sample in taken] == sorted(wanted) and one.engine.num_unfinished == 6
    assert one.engine.withdraw(wanted) == [] and one.engine.progress(wanted) == []
    done = drain(one.engine) | {sample.id: sample for sample in one.engine.generate(taken, sampling)}
    for request in everything:
        assert list(done[request.id].tokens) == expected_tokens(request, sampling)


def test_a_suspended_response_continues_in_another_engine(rig) -> None:  # type: ignore[no-untyped-def]
    first, second = rig(version=1, pace_s=0.003), rig(version=2)
    first.engine.submit(requests(), LONG)
    wait_for(lambda: first.server.num_running == 9, first.engine.step)
    time.sleep(0.02)
    suspended = first.engine.suspend()
    for request, done in zip(suspended, second.engine.generate(suspended, LONG), strict=True):
        assert_follows_the_model(request, done)
        assert set(done.policy_versions) == {1, 2}
        assert request.tokens
        assert done.tokens[: len(request.tokens)] == request.tokens


def test_what_ends_while_it_is_suspended_is_not_drawn_again(rig) -> None:  # type: ignore[no-untyped-def]
    """A second draw of its end would make long responses more likely."""
    one = rig()
    request = requests(1)[0]
    one.engine.submit([request], GREEDY)
    one.engine.step()  # sends it
    wait_for(lambda: one.server.most_running and not one.server.num_running)
    time.sleep(0.05)
    [suspended] = one.engine.suspend()
    assert len(suspended.tokens) == 15
    assert one.engine.num_unfinished == 0
    one.server.draw = lambda context, version: (1, -1.0)
    elsewhere = [Sample(request.id, (5, 6), 0)]  # another request of that number comes between
    assert list(one.engine.generate(elsewhere, GREEDY)[0].tokens) == [1] * 16
    [done] = one.engine.generate([suspended], GREEDY)
    assert list(done.tokens) == expected_tokens(request, GREEDY)
    [again] = one.engine.generate([suspended], GREEDY)
    assert list(again.tokens) == [*suspended.tokens, 1]


def test_weights_change_while_responses_run(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=5, pace_s=0.002, max_running_requests=6)
    engine, everything = one.engine, requests()
    engine.submit(everything, LONG)
    for version in (6, 7):
        wait_for(lambda: one.server.num_running == 6, engine.step)
        time.sleep(0.03)
        engine.begin_update()
        with pytest.raises(SyncError):
            engine.suspend()
        engine.end_update(version)
    completions = drain(engine)
    for request in everything:
        assert_follows_the_model(request, completions[request.id])
        versions = completions[request.id].policy_versions
        assert list(versions) == sorted(versions)
        assert set(versions) == ({5, 6, 7} if request.id < 106 else {7})
    assert one.server.num_starts == 1


def test_keys_and_values_of_old_weights_serve_no_new_request(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(max_running_requests=2)
    engine = one.engine
    engine.submit(requests(4), LONG)
    engine.step()
    engine.begin_update()
    engine.end_update(1)
    drain(engine)
    engine.generate(requests(1), GREEDY)
    old, *new = dict.fromkeys(one.server.cache_keys)
    assert len(new) == 1
    sent_to_old = sum(
        len(body["rid"]) for path, body in one.server.calls if path == "/generate" and body["extra_key"] == old
    )
    assert sent_to_old == 2, "samples in the engine's queue are sent to the new weights"
    one.sync(1)
    engine.generate(requests(1), GREEDY)
    assert len({*one.server.cache_keys}) == 3


BROKEN = (None, math.nan, -math.inf, -3.4e38)
"""Servers' values for a log-prob that is not finite."""


@pytest.mark.parametrize("broken", BROKEN)
def test_a_sample_without_finite_log_probs_fails_alone(rig, broken) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=2, pace_s=0.002)
    one.server.draw = lambda context, version: (1, broken if context[0] == 7 and len(context) == 5 else -1.0)
    one.engine.submit([Sample(number, (first, 1), 0) for number, first in ((1, 1), (2, 7), (3, 1))], GREEDY)
    ended = drain(one.engine)
    assert {number: sample.status for number, sample in ended.items()} == {
        1: Status.TRUNCATED,
        2: Status.FAILED,
        3: Status.TRUNCATED,
    }
    assert ended[2].logprobs == (-1.0,) * 3


@pytest.mark.parametrize("broken", BROKEN)
def test_weights_whose_log_probs_are_never_finite_are_reported(rig, broken) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=2, pace_s=0.002)
    one.server.draw = lambda context, version: (1, broken)
    one.engine.submit([Sample(1, (1, 2), 0)], GREEDY)
    one.engine.submit([Sample(2, (1,) * 10, 0)], replace(GREEDY))
    with pytest.raises(DivergenceError, match="version 2"):
        drain(one.engine)
    assert one.engine.num_unfinished == 0
    one.server.draw = lambda context, version: (1, -1.0)
    assert len(one.engine.generate(requests(2), GREEDY)) == 2


def test_on_sound_weights_many_samples_in_a_row_have_to_fail() -> None:
    good, bad = (Sample(1, (1,), 0).drawn((), (), (), status) for status in (Status.STOPPED, Status.FAILED))
    watch = DivergenceWatch()
    watch.ended(good, version=1, num_beside=0)
    for sample in (*[bad] * 15, good, *[bad] * 15):
        watch.ended(sample, version=1, num_beside=0)
    with pytest.raises(DivergenceError):
        watch.ended(bad, version=1, num_beside=0)


def test_a_dead_server_is_replaced_and_everything_completes(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=5, pace_s=0.002, max_running_requests=6)
    engine, everything = one.engine, requests()
    advances = one.num_advances
    engine.submit(everything, LONG)
    engine.step()
    wait_for(lambda: one.server.num_running == 6, engine.step)
    wait_for(lambda: any(len(running.tokens) > 200 for running in one.server._running), engine.step)
    one.server.die()
    completions = drain(engine)
    assert (one.server.num_starts, engine.num_restarts, engine.policy_version) == (2, 1, 5)
    assert one.num_advances > advances
    for request in everything:
        assert list(completions[request.id].tokens) == expected_tokens(request, LONG, version=5)
        assert_follows_the_model(request, completions[request.id])
    contexts = [len(ids) for path, body in one.server.calls if path == "/generate" for ids in body["input_ids"]]
    assert max(contexts) > 128, "known tokens are not generated again"


@pytest.mark.parametrize("fault", ["connections", "silence", "status"])
def test_a_server_that_only_seems_to_live_is_replaced(rig, fault: str) -> None:  # type: ignore[no-untyped-def]
    one = rig(pace_s=0.002, hang_timeout_s=2.0)
    one.engine.submit(requests(4), LONG)
    wait_for(lambda: one.server.num_running == 4, one.engine.step)
    if fault == "connections":
        one.server.die(noticed=False)
    elif fault == "silence":
        one.server.hangs = True
    else:
        one.server.answers["/generate"] = (500, "scheduler died")
        one.server.on_start = one.server.answers.clear
        one.engine.submit(requests(2, first=6), LONG)
    completions = drain(one.engine)
    assert one.server.num_starts == 2
    for request in requests(4):
        assert list(completions[request.id].tokens) == expected_tokens(request, LONG)


def test_a_server_that_is_slow_but_draws_is_left_alone(rig) -> None:  # type: ignore[no-untyped-def]
    one = rig(pace_s=0.005, hang_timeout_s=1.0)
    done = one.engine.generate(requests(2), LONG)
    assert len(done) == 2 and one.server.num_starts == 1


@pytest.mark.parametrize(
    ("status", "said", "match", "num_starts"),
    [
        (500, "out of luck", r"out of luck.*2 times.*rollout\.sglang\.max_restarts = 2", 3),
        (400, "The input is too long", "The input is too long", 1),
    ],
    ids=["keeps dying", "refuses a request"],
)
def test_a_server_that_keeps_dying_or_refuses_ends_the_job(rig, status, said, match, num_starts) -> None:  # type: ignore[no-untyped-def]
    one = rig(max_restarts=2)
    one.server.answers["/generate"] = (status, said)
    one.engine.submit(requests(1), GREEDY)
    with pytest.raises(EngineError, match=match):
        drain(one.engine)
    assert one.server.num_starts == num_starts


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_server_that_dies_in_an_update_is_replaced_at_its_end(rig, when: str) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=1, pace_s=0.002)
    one.engine.submit(requests(4), LONG)
    wait_for(lambda: one.server.num_running == 4, one.engine.step)
    time.sleep(0.05)
    if when == "before":
        one.server.die()
    one.engine.begin_update()
    if when == "during":
        one.server.die()
    one.engine.end_update(2)
    assert (one.engine.policy_version, one.server.num_starts, one.server.version) == (2, 2, 2)
    completions = drain(one.engine)
    for request in requests(4):
        assert_follows_the_model(request, completions[request.id])
        assert completions[request.id].policy_versions[-1] == 2


@pytest.mark.parametrize("dies_at_start", [1, 2])
def test_a_server_that_dies_as_soon_as_it_is_started_counts(rig, dies_at_start: int) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=1, max_restarts=2, dies_at_start=dies_at_start)
    one.server.die()
    assert len(one.engine.generate(requests(2), GREEDY)) == 2
    assert (one.server.num_starts, one.engine.num_restarts) == (3, 2)


@pytest.mark.parametrize("fault", ["death", "silence"])
def test_suspending_from_a_lost_server_gives_back_what_is_known(rig, fault: str) -> None:  # type: ignore[no-untyped-def]
    one = rig(version=1, pace_s=0.002, hang_timeout_s=0.5)
    one.engine.submit(requests(4), LONG)
    wait_for(lambda: any(len(running.tokens) > 100 for running in one.server._running), one.engine.step)
    one.engine.step()
    one.server.die() if fault == "death" else setattr(one.server, "hangs", True)
    suspended = one.engine.suspend()
    assert [request.id for request in suspended] == [request.id for request in requests(4)]
    assert all(len(request.tokens) >= 65 for request in suspended)
    assert one.engine.num_unfinished == 0
    for request, done in zip(requests(4), one.engine.generate(suspended, LONG), strict=True):
        assert list(done.tokens) == expected_tokens(request, LONG, version=1)
        assert_follows_the_model(request, done)
    assert one.server.num_starts == 2


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """Returns a store with image 7 of 4 tokens and image 8 of 6."""
    store = ImageStore(tmp_path, 0, keep_steps=1, cache_bytes=1e9)
    for key, height in ((7, 28), (8, 42)):
        store.put(key, np.full((1, height, 28, 3), key, np.uint8), step=0)
    store.hold([7, 8], 0)
    return store


def seeing_sample(number: int, *images: PlacedImage) -> Sample:
    """Returns a sample with a context of one text token, image 7, one text token, image 8 and one text token."""
    five = IMAGE_TOKEN
    return Sample(number, (1, *[five] * 4, 2, *[five] * 6, 3), seed=number, images=images)


BOTH = PlacedImage(1, 7, (1, 4, 4)), PlacedImage(6, 8, (1, 6, 4))


def test_images_travel_with_token_ids(rig: Callable[..., Rig], store: ImageStore) -> None:
    """The server repeats placeholders, so the context has the length of the sample's. Placeholders of no image stay."""
    made = rig(images=ServerImages(store, merge=2))
    samples = [seeing_sample(0, *BOTH), Sample(1, (IMAGE_TOKEN, 4), seed=1)]
    made.engine.submit(samples, GREEDY)
    done = drain(made.engine)
    assert all([*done[sample.id].tokens] == expected_tokens(sample, GREEDY) for sample in samples)
    (body,) = [body for path, body in made.server.calls if path == "/generate"]
    assert body["input_ids"] == [[1, IMAGE_TOKEN, 2, IMAGE_TOKEN, 3], [IMAGE_TOKEN, 4]]
    assert [len(of or ()) for of in body["image_data"]] == [2, 0]


def test_a_server_that_resizes_images_ends_the_job(rig: Callable[..., Rig], store: ImageStore) -> None:
    made = rig(images=ServerImages(store, merge=2))
    made.server.num_image_tokens = lambda url: 3
    made.engine.submit([seeing_sample(0, *BOTH)], GREEDY)
    with pytest.raises(EngineError, match=r"a context of 9 tokens for sample 0 with 2 images; expected 13"):
        drain(made.engine)
