"""Ranks without a role: a run with some of them does the same as a run without them."""

from pathlib import Path

from rltrain.checkpoint.run_folder import name_of
from tests.support.jobs import QUICKSTART, read_records, train_in_turn

IDLE_FIRST = "placement={'actor, reference': 1, 'rollout, reward': 2}"
IDLE_LAST = "placement={'actor, reference': 1, 'rollout, reward': 0}"


def test_a_run_with_idle_ranks_saves_and_goes_on(quickstart_files: Path, data_overrides: list[str], tmp_path: Path):
    output = tmp_path / "run"
    common = [
        *(f"model.path={quickstart_files}/model", *data_overrides, f"output_dir={output}", "actor.parallel.tp=1"),
        "batch={prompts_per_step: 4, samples_per_prompt: 2, mini_batches: 1}",
        *("rollout.sampling.max_response_tokens=8", "data.eval.max_rows=4", "data.train.max_rows=1024"),
        *("evaluation={interval: 1, stop_at: 2.0}", "checkpoint={save_interval: 1, save_hf: false}"),
        "timeouts.no_progress_s=60",
    ]
    last = [*common, IDLE_LAST, "steps=3", "logging.trace=true"]
    told = train_in_turn(QUICKSTART, {"first": [*common, IDLE_FIRST, "steps=2"], "last": last}, tmp_path, num_ranks=3)
    for rank in (0, 2):
        assert told.count(f"placement: rank {rank} hosts no role") == 1, told
    assert "resuming after step 2" in told
    assert [record["step"] for record in read_records(output)] == [0, 1, 2, 3], "each once, and the last evaluation"
    saved = [output / "checkpoints" / name_of(step) / "ranks" for step in (2, 3)]
    assert [sorted(path.name for path in ranks.iterdir()) for ranks in saved] == [
        ["rank_00001.safetensors", "rank_00002.safetensors"],
        ["rank_00000.safetensors", "rank_00001.safetensors"],
    ]
