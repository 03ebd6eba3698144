"""Whole jobs whose actor trains adapters: the weights of engines, the reference, resumed runs, and learning."""

from pathlib import Path

import pytest
import torch

from rltrain.cli.main import main
from rltrain.models import read_architecture
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import stored_tensors
from tests.support.jobs import QUICKSTART, column, learnt, train_each
from tests.support.tolerances import EPS_OF_ACTOR, near

LORA = ("model.lora={rank: 8, alpha: 16}", "actor.optimizer.lr=3e-3")
SMALL = (
    "steps=3",
    "batch={prompts_per_step: 4, samples_per_prompt: 8, mini_batches: 2}",
    "data.eval=null",
    "data.train.max_rows=1024",
    "logging={progress: false, samples: 0}",
)
COLOCATED = "placement={'actor, reference, rollout, reward': 0-1}"
APART = ("weight_sync.adapters=apart",)
SHARDED = ("actor.backend=fsdp", "actor.parallel.tp=1")

pytestmark = pytest.mark.slow  # tests/distributed/test_lora.py has a quick part


@pytest.fixture(scope="module")
def jobs(warm_start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    common = [*warm_start[:2], *SMALL, *LORA, COLOCATED, "weight_sync.verify=true", EPS_OF_ACTOR]
    leaving = [f"{role}.offload=true" for role in ("actor", "reference", "rollout")]
    of_jobs = {
        "stays": common,
        "leaves": [*common, *leaving],
        "sharded": [*common, *SHARDED],
        "apart": [*common, *leaving, *APART, "rollout.parallel.tp=2"],
    }
    return folder, train_each(QUICKSTART, of_jobs, folder, 2)


@pytest.mark.parametrize("name", ["stays", "sharded", "apart"])
def test_engines_draw_with_the_adapters(jobs, name):
    assert max(column(jobs[1][name], "train/train_rollout_logprob_abs_diff_max")) <= 2e-4


def test_both_backends_learn_the_same(jobs):
    stays, sharded = (column(jobs[1][name], "train/reference_kl") for name in ("stays", "sharded"))
    assert stays == pytest.approx(sharded, rel=1e-2)


def test_engines_with_adapters_apart_get_the_base_once(jobs, warmed_up):
    architecture, grid = read_architecture(warmed_up), Grid((0, 1), tp=2)

    def held_bytes(of):
        pieces = [engine_layout(of, grid).on(rank).pieces for rank in grid.ranks]
        return sum(4 * int((one["rows"] * one["cols"]).sum()) for one in pieces)

    base, adapters = held_bytes(architecture), held_bytes(architecture.adapted(8, None))
    between, within = (column(jobs[1]["apart"], f"perf/weight_sync_{of}bytes") for of in ("", "local_"))
    assert [sum(of_sync) for of_sync in zip(between, within, strict=True)] == [base + adapters, adapters, adapters]
    found, wanted = (column(jobs[1][name], "train/reference_kl") for name in ("apart", "stays"))
    assert found == pytest.approx(wanted, rel=1e-2), "they learn the same"


def test_the_reference_is_the_base_in_the_actors_memory(jobs):
    divergence = column(jobs[1]["stays"], "train/reference_kl")
    assert divergence[0] < divergence[-1], "the actor departs from its base"
    assert not column(jobs[1]["stays"], "memory/reference_resident_bytes"), "the reference has no memory of its own"


def test_training_is_identical_where_the_actor_leaves_the_device(jobs):
    assert learnt(jobs[1]["leaves"]) == learnt(jobs[1]["stays"])
    assert column(jobs[1]["leaves"], "memory/actor_residue_bytes")


def test_an_export_is_the_base_with_the_exported_adapters_merged(jobs, warmed_up):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = jobs[0] / "stays"
    base = AutoModelForCausalLM.from_pretrained(warmed_up)
    merged = PeftModel.from_pretrained(base, folder / "hf_adapter").merge_and_unload().state_dict()
    exported, start = stored_tensors(folder / "hf"), stored_tensors(warmed_up)
    assert exported.keys() <= merged.keys()
    assert all((tensor - merged[name]).abs().max() <= 1e-6 for name, tensor in exported.items())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in exported.items())


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(warm_start, tmp_path):
    apart = ["placement={'actor, reference': 0-1, 'rollout, reward': 2-3}", "rollout.parallel.tp=2"]
    common = [*warm_start[:2], *SMALL, *LORA, *apart, "checkpoint.save_interval=1", EPS_OF_ACTOR]
    resume = f"checkpoint.resume={tmp_path}/first/checkpoints/step_0000002"
    every = {
        "first": [*common, "checkpoint.keep=0"],
        "same": [*common, resume],
        "other": [*common, resume, "actor.parallel.tp=1"],
    }
    found = {name: learnt(records) for name, records in train_each(QUICKSTART, every, tmp_path, 4).items()}
    last, (same,), (other,) = found["first"][-1], found["same"], found["other"]
    assert same == last
    assert_the_last_checkpoint_is_what_was_exported(tmp_path / "first", tmp_path / "later")
    expected = {k: v for k, v in last.items() if k != "train/tokens"}
    assert {k: v for k, v in other.items() if k != "train/tokens"} == near(expected, tokens=32, rel=1e-3, abs=1e-5)


def assert_the_last_checkpoint_is_what_was_exported(output: Path, later: Path) -> None:
    """Adapters are merged into the base. The export merged them into its shards, so sums may round differently."""
    assert main(["convert", "run-to-hf", "--input", str(output / "checkpoints"), "--output", str(later)]) == 0
    exported, converted = stored_tensors(output / "hf"), stored_tensors(later)
    assert converted.keys() == exported.keys()
    assert all((converted[name] - exported[name]).abs().max() <= 1e-6 for name in exported)
