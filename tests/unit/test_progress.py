"""The progress bar and its plain-line form."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from rltrain.config.schema import Config
from rltrain.observability.progress import Progress, checkpoints_of, format_duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config(steps: int = 4, progress: bool = True, output_dir: object = "nowhere", **sections: object) -> Config:
    return Config.model_validate(
        {
            "steps": steps,
            "output_dir": str(output_dir),
            "placement": {"actor": 0},
            "model": {"path": "model"},
            "data": {"train": {"path": "train.jsonl"}},
            "logging": {"progress": progress},
            **sections,
        }
    )


def run(progress: Progress, clock: Clock, num_steps: int, step_s: float) -> None:
    for step in range(num_steps):
        clock.now += step_s
        progress.write(
            step,
            {"rollout/reward_mean": 0.1 * step, "perf/rollout_tokens_per_s": 12345.6, "perf/generate_s": step_s / 2}
            | {"perf/actor_tokens_per_gpu_s": 7.0},
        )


def test_plain_lines_come_at_intervals_and_at_the_end() -> None:
    output, clock = io.StringIO(), Clock()
    with Progress(config(steps=30), console=Console(file=output), interval_s=10, clock=clock) as progress:
        run(progress, clock, num_steps=30, step_s=1.0)
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["step 10/30", "step 20/30", "step 30/30"]
    assert lines[0] == "step 10/30  reward 0.900  rollout tokens/s 12,346  left 0:20"
    assert lines[-1] == "seconds by task: generate 15.0; waiting in them 0.0; whole run 30.0"


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({}, "every 600 s, and when the run is stopped, in nowhere/checkpoints; the same command goes on"),
        ({"save_interval": 2, "dir": "there"}, "every 2 steps, every 600 s, and when the run is stopped, in there;"),
        ({"save_interval": 2, "save_every_s": None}, "every 2 steps, and when the run is stopped,"),
        ({"save_every_s": 0, "memory": {"interval": 3}}, "checkpoints: every 3 steps in the nodes' memory; the same"),
        ({"save_every_s": 0}, "checkpoint.save_interval and checkpoint.save_every_s are 0; an interrupted run begins"),
    ],
)
def test_the_first_line_says_what_an_interrupted_run_goes_on_from(checkpoint: dict[str, object], said: str) -> None:
    output = io.StringIO()
    with Progress(config(checkpoint=checkpoint), console=Console(file=output)) as progress:
        progress.say(checkpoints_of(progress.config))
    assert said in output.getvalue()


def test_an_evaluation_is_always_shown_and_stays() -> None:
    output, clock = io.StringIO(), Clock()
    progress = Progress(config(steps=100), console=Console(file=output), interval_s=10, clock=clock)
    clock.now += 1
    progress.write(0, {"eval/score": 0.314159})
    clock.now += 10
    progress.write(1, {"rollout/reward_mean": 0.5})
    first, second = output.getvalue().splitlines()
    assert first.startswith("step 1/100  held-out 0.314")
    assert "reward 0.500" in second and "held-out 0.314" in second


def test_a_run_that_stops_early_says_at_which_step_and_why() -> None:
    output = io.StringIO()
    early = config(
        steps=400, evaluation={"stop_at": 0.35, "sets": [{"name": "held", "data": {"path": "x.jsonl"}}], "interval": 1}
    )
    with Progress(early, console=Console(file=output)) as progress:
        for step in range(186):
            progress.write(step, {"rollout/reward_mean": 0.1})
        progress.write(185, {"eval/held/score": 0.352})
        progress.write(400, {"perf/save_hf_s": 1.0})
    *_, last, stopped, seconds = output.getvalue().splitlines()
    assert last.startswith("step 186/400  ") and seconds.startswith("seconds by task")
    assert stopped == "stopped after step 186 of 400: eval/held/score 0.352 reached evaluation.stop_at 0.35"


def test_a_run_that_stops_at_a_held_out_loss_says_so() -> None:
    output = io.StringIO()
    sft = config(
        steps=9,
        algorithm="sft",
        data={"train": {"path": "t"}, "eval": {"path": "e"}},
        evaluation={"stop_at": 0.5},
    )
    with Progress(sft, console=Console(file=output)) as progress:
        progress.write(0, {"eval/loss": 0.75})
        progress.write(1, {"eval/loss": 0.25})
        progress.write(9, {"perf/save_hf_s": 1.0})
    said = output.getvalue()
    assert "held-out loss 0.7500" in said and "eval/loss 0.25 reached evaluation.stop_at 0.5" in said


def test_a_run_names_what_it_has_left(tmp_path: Path) -> None:
    output = io.StringIO()
    (tmp_path / "hf").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    with Progress(config(output_dir=tmp_path), console=Console(file=output)) as progress:
        progress.write(0, {"perf/update_s": 1.0})
    said = f"in {tmp_path}: the model hf, metrics metrics.jsonl; rltrain report {tmp_path} makes a page of them"
    assert output.getvalue().splitlines()[-1] == said


def test_evaluation_sets_are_shown_by_their_names() -> None:
    output, clock = io.StringIO(), Clock()
    sets = {"sets": [{"name": "hard", "data": {"path": "h"}}]}
    with_sets = Config.model_validate({**config().model_dump(), "evaluation": sets})
    Progress(with_sets, console=Console(file=output), clock=clock).write(0, {"eval/hard/score": 0.25})
    assert output.getvalue().startswith("step 1/4  hard 0.250")


@pytest.mark.parametrize("after_the_last", [None, {"eval/score": 0.75}, {"perf/save_hf_s": 1.0}])
def test_one_line_is_for_the_last_step_and_the_record_that_may_follow_it(after_the_last) -> None:
    output, clock = io.StringIO(), Clock()
    with Progress(config(steps=2), console=Console(file=output), interval_s=1, clock=clock) as progress:
        for step in range(2):
            clock.now += 1
            progress.write(step, {"eval/score": 0.5})
        if after_the_last:
            progress.write(2, after_the_last)
    lines = [line for line in output.getvalue().splitlines() if line.startswith("step")]
    last_score = 0.75 if after_the_last and "eval/score" in after_the_last else 0.5
    assert lines == ["step 1/2  held-out 0.500  left 0:01", f"step 2/2  held-out {last_score:.3f}  left 0:00"]


def test_a_terminal_gets_a_bar_that_is_taken_down() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True, width=160)
    progress = Progress(config(steps=4), console=console, clock=clock)
    run(progress, clock, num_steps=2, step_s=3.0)
    progress.close()
    progress.close()
    text = output.getvalue()
    assert "2/4" in text and "reward 0.100" in text and "left 0:06" in text
    hide_cursor, show_cursor = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hide_cursor) == text.count(show_cursor) == 1
    assert text.count("seconds by task") == 1


ALL_VALUES = {
    "rollout/reward_mean": 0.5,
    "eval/score": 0.25,
    "train/loss": 0.01,
    "perf/rollout_tokens_per_s": 123456.0,
    "perf/train_tokens_per_s": 33333.0,
}


def bar_of_width(width: int) -> str:
    """The last line of a bar, as a terminal of `width` columns shows it."""
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True, width=width)
    with Progress(config(steps=1600), console=console, clock=clock) as progress:
        clock.now += 3600
        progress.write(799, ALL_VALUES)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    return next(line for line in reversed(re.split(r"[\r\n]+", shown)) if line.startswith("step")).rstrip()


@pytest.mark.parametrize(
    ("width", "values"),
    [
        (160, ["reward 0.500", "held-out 0.250", "loss 0.0100", "rollout tokens/s 123,456", "train tokens/s 33,333"]),
        (80, ["reward 0.500", "held-out 0.250"]),
        (60, ["reward 0.500"]),
        (40, []),
    ],
)
def test_on_a_narrow_terminal_step_bar_and_time_left_stay_and_values_go_whole(width: int, values: list[str]) -> None:
    bar = bar_of_width(width)
    assert len(bar) <= width
    match = re.fullmatch(r"step +800/1600 ([━╸╺]+) left 1:00:00 ?(.*)", bar)
    assert match, bar
    assert len(match[1]) >= 4
    assert match[2] == "  ".join(values)


def test_the_bar_is_taken_down_when_the_run_fails() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=160)
    with pytest.raises(RuntimeError), Progress(config(), console=console):
        raise RuntimeError
    assert "\x1b[?25h" in output.getvalue()


def test_nothing_is_printed_when_progress_is_off() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True)
    with Progress(config(progress=False), console=console, clock=clock) as progress:
        run(progress, clock, num_steps=4, step_s=60.0)
    assert output.getvalue() == ""


def test_only_task_times_are_summed() -> None:
    output, clock = io.StringIO(), Clock()
    metrics = {
        "perf/update_s": 2.0,
        "perf/step_time_s": 9.0,
        "perf/weight_sync_wire_s": 5.0,
        "perf/rollout_tokens_per_s": 5.0,
        "perf/weight_sync_s": 3.0,
        "perf/weight_sync_wait_s": 40.0,
        "perf/update_wait_s": 0.5,
    }
    with Progress(config(), console=Console(file=output), clock=clock) as progress:
        progress.write(0, metrics)
        progress.write(1, metrics)
    expected = "seconds by task: weight_sync 6.0, update 4.0; waiting in them 81.0; whole run 0.0"
    assert output.getvalue().splitlines()[-1] == expected


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
