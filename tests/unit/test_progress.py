"""The progress bar and its plain-line form."""

import io

import pytest
from rich.console import Console

from rltrain.config.schema import Config
from rltrain.observability.progress import Progress, format_duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config(steps: int = 4, progress: bool = True) -> Config:
    return Config.model_validate(
        {
            "steps": steps,
            "placement": {"actor": 0},
            "model": {"path": "model"},
            "data": {"train": {"path": "train.jsonl"}},
            "logging": {"progress": progress},
        }
    )


def run(progress: Progress, clock: Clock, num_steps: int, step_s: float) -> None:
    for step in range(num_steps):
        clock.now += step_s
        progress.write(
            step,
            {"rollout/reward_mean": 0.1 * step, "perf/rollout_tokens_per_s": 12345.6, "perf/generate_s": step_s / 2},
        )


def test_plain_lines_come_at_intervals_and_at_the_end() -> None:
    output, clock = io.StringIO(), Clock()
    with Progress(config(steps=30), console=Console(file=output), interval_s=10, clock=clock) as progress:
        run(progress, clock, num_steps=30, step_s=1.0)
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["step 10/30", "step 20/30", "step 30/30"]
    assert lines[0] == "step 10/30  reward 0.900  rollout tokens/s 12,346  left 0:20"
    assert lines[-1] == "seconds by task: generate 15.0; whole run 30.0"


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


def test_the_record_after_the_last_step_does_not_count_as_one() -> None:
    output, clock = io.StringIO(), Clock()
    progress = Progress(config(steps=2), console=Console(file=output), clock=clock)
    for step in range(3):
        clock.now += 1
        progress.write(step, {"eval/score": 0.5})
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == ["step 1/2", "step 2/2", "step 2/2"]


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
    }
    with Progress(config(), console=Console(file=output), clock=clock) as progress:
        progress.write(0, metrics)
        progress.write(1, metrics)
    assert output.getvalue().splitlines()[-1] == "seconds by task: weight_sync 6.0, update 4.0; whole run 0.0"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
