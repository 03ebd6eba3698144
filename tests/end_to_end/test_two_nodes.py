"""Two torchrun agents on one machine act as two nodes: node ranks place roles, and rank order is node order."""

from pathlib import Path

from tests.support.torchrun import run_on_two_nodes


def test_a_job_over_two_nodes_finishes(quickstart_files: Path, data_overrides: list[str], tmp_path: Path):
    program = [
        *("launch/train.py", "--config=configs/quickstart.yaml", f"model.path={quickstart_files}/model"),
        *(f"output_dir={tmp_path}", *data_overrides, "data.eval.max_rows=4", "data.train.max_rows=1024", "steps=1"),
        "placement={'actor, reference': 'node:0', 'rollout, reward': 'node:1'}",
        "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}",
    ]
    first, second = run_on_two_nodes(program, num_ranks=(2, 2), timeout_s=200)
    assert [first[0], second[0]] == [0, 0], f"{first}\n{second}"
    assert "step 1/1" in first[1] + first[2]
    assert (tmp_path / "hf/config.json").exists()
