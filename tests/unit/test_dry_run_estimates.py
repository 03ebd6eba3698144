"""What --dry-run says of bytes and seconds, how much it says for thousands of ranks, and what it refuses."""

import json
from pathlib import Path

import pytest

from rltrain.cli.tiny_model import Size, qwen3_config
from rltrain.errors import ConfigError
from rltrain.planning.description import describe_job
from rltrain.planning.hardware import GPUS
from rltrain.planning.options import DryRunOptions
from rltrain.planning.sizes import seconds, size, sizes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MOST_LINES = 135
APART = "placement={'actor, reference': 0-2047, 'rollout, reward': 2048-4095}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with the config.json of a model with 0.6 and one with 8 billion parameters."""
    folder = tmp_path_factory.mktemp("models")
    small = Size(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, max_positions=40960)
    large = Size(hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288, max_positions=40960)
    for name, shape in {"small": small, "large": large}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(qwen3_config(shape, 151936, 0, 0)))
    return folder


def describe(model, *overrides, **options):
    options = DryRunOptions(**{"world_size": 8, **options})
    return describe_job(CONFIGS / "gsm8k_qwen3_0.6b.yaml", [f"model.path={model}", *overrides], options)


def test_bytes_seconds_and_throughput_are_told(models):
    text = describe(models / "small")
    assert "ranks 0-7: peak " in text and "of 84.9 GB at update: activations" in text
    assert "tokens/s/GPU" in text and "of it ranks wait: actor" in text
    assert "of 150 GB" in describe(models / "small", gpu="h200")


def test_a_host_that_cannot_keep_what_leaves_is_told_of(models, tmp_path):
    small_host = tmp_path / "mine.yaml"
    small_host.write_text(GPUS["h100"].model_copy(update={"host_memory_gb": 1.0}).model_dump_json())
    assert "a node would pin" in describe(models / "small", gpu=str(small_host))
    assert "a node would pin" not in describe(models / "small")


def test_longer_responses_take_longer(models):
    def step_s(response_tokens):
        text = describe(models / "small", response_tokens=response_tokens)
        return float(text.partition("a step: ")[2].split()[0])

    assert step_s(1000) > step_s(500)


def test_what_does_not_fit_is_refused_with_what_would_help(models):
    with pytest.raises(ConfigError) as refused:
        describe(models / "large")
    first, heading, *changes = str(refused.value).splitlines()
    assert first.startswith("ranks 0-7 (actor, reference, rollout) would hold ") and "--gpu h100" in first
    assert heading.endswith("each alone:") and len(changes) == 3
    text, _, verdict = changes[0].strip().rpartition(": ")
    assert verdict.endswith("fits")
    key, _, value = text.partition(": ")
    told = describe(models / "large", f"{key}={value}")
    assert f"peak {verdict.split(' at ')[0]} of" in told, "what was promised is what it then is"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [APART, "actor.parallel={tp: 4, pp: 4}", "schedule={mode: pipelined}", "batch.mini_batches=1"],
            marks=pytest.mark.slow,
            id="pipelined with stages",
        ),
        pytest.param(["rollout.parallel={tp: 8}"], id="colocated"),
    ],
)
def test_thousands_of_ranks_are_told_of_in_a_page(models, overrides):
    text = describe(models / "small", *overrides, "batch.prompts_per_step=16384", world_size=4096)
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= 130
    assert "ranks 0-2047" in text or "ranks 0-4095" in text


def test_every_rank_and_pair_on_request(models):
    split = "placement={'actor, reference': 0-3, 'rollout, reward': 4-7}"
    short, long = (describe(models / "small", split, every_rank=every) for every in (False, True))
    assert len(long.splitlines()) > len(short.splitlines()) + 8
    assert "dp3" in long and "dp3" not in short
    assert any(line.split()[:2] == ["0", "4"] and line.endswith("node") for line in long.splitlines())


def test_search_says_what_to_write(models):
    text = describe(models / "large", search=True)
    assert "does not fit" in text
    _, header, first, *_ = text.partition("Placements that would be fastest")[2].splitlines()
    assert header.split() == ["a", "step", "tokens/s/GPU", "peak", "keys"]
    keys = [part for part in first.split() if part.startswith(("actor.parallel", "rollout.parallel"))]
    assert len(keys) == 3
    assert describe(models / "large", *keys).count("peak") >= 1, "it fits"


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 B"), (999, "999 B"), (1.5e3, "1.50 kB"), (12e6, "12.0 MB"), (4.2e12, "4200 GB")]
)
def test_bytes_have_three_digits(num_bytes, words):
    assert size(num_bytes) == words


def test_what_is_equal_is_told_of_by_name():
    assert sizes({"weights": 1, "gradients": 1, "logits": 2, "nothing": 0}) == "logits 2 B, gradients 1 B, weights 1 B"


def test_seconds_have_three_digits():
    assert [seconds(value) for value in (0, 0.02, 1.5, 61.25, 600)] == ["0 s", "20 ms", "1.50 s", "61.2 s", "600 s"]
