"""A whole job whose actor and reference cut sequences among ranks reports what one does in which they do not."""

import json
import sys

import pytest

from tests.support.jobs import REPOSITORY, run
from tests.support.tolerances import EPS_OF_ACTOR, near

pytestmark = pytest.mark.slow

STEPS, PROMPTS, SAMPLES = 1, 8, 8
SAME = (
    "placement={'actor, reference, rollout, reward': 0-3}",
    f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 2}}",
    "loss.old_logprobs=actor",
    f"steps={STEPS}",
    "data.eval=null",
    "data.train.max_rows=1024",
    "checkpoint.save_hf=false",
    EPS_OF_ACTOR,
)
LAYOUTS = {"whole": "actor.parallel={tp: 1}", "gathered": "actor.parallel={cp: 2}"}


def test_a_run_reports_what_one_without_context_parallelism_does(warmed_up, data_overrides, tmp_path):
    paths = [f"model.path={warmed_up}", *data_overrides]
    jobs = [[*paths, *SAME, layout, f"output_dir={tmp_path / name}"] for name, layout in LAYOUTS.items()]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    script = ["tests/support/consecutive_jobs.py", str(REPOSITORY / "configs/quickstart.yaml")]
    done = run([*torchrun, *script, str(tmp_path / "jobs.json")], timeout_s=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    (first,), (others,) = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in LAYOUTS
    )
    for record in (first, others):
        assert record["train/grad_norm"] > 0
    wanted = {name: value for name, value in first.items() if name.split("/")[0] in ("train", "rollout")}
    same = near(wanted, tokens=PROMPTS * SAMPLES, rel=1e-4, abs=1e-4)  # a response has a token at least
    assert {name: others[name] for name in wanted} == same
