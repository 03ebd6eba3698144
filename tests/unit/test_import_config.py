"""Tests of configs of other trainers: commands, shell scripts, sizes, and the pages about them."""

import contextlib
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.cli.main import run_script
from rltrain.config.explain import all_keys
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.import_config.command import imported, peak_bytes, written
from rltrain.import_config.pages import FOLDER, PAGES, modules_of, page
from rltrain.import_config.shell_script import read_text
from rltrain.import_config.shell_values import UNKNOWN
from rltrain.import_config.sources import FRAMEWORKS, framework_of
from rltrain.import_config.translation import RowCounts, Translation
from rltrain.planning.description import describe_job
from rltrain.planning.hardware import gpu_named
from rltrain.planning.options import DryRunOptions

main = partial(run_script, "import-config")
SLIME = """
#!/bin/bash
MODEL_ARGS=(--num-layers 36 --hidden-size 2560 --swiglu)
ROLLOUT_ARGS=(
   --prompt-data /data/dapo.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rm-type deepscaler
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 128
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \\
   --hf-checkpoint /models/Qwen3-4B \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} \\
   --tensor-model-parallel-size 2 --sequence-parallel \\
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 \\
   --attention-dropout 0.0 --hidden-dropout 0.0 \\
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl \\
   --eps-clip 0.2 --eps-clip-high 0.28 \\
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.8 \\
   --eval-prompt-data aime /data/aime.jsonl --n-samples-per-eval-prompt 16 --eval-interval 20
"""
VERL = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files="['$HOME/data/gsm8k/test.parquet']" \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15 trainer.test_freq=5 $@
"""
SKYRL = """
: "${NUM_GPUS:=4}"
uv run --isolated -m skyrl.train.entrypoints.main_base \\
  data.train_data="['/data/train.parquet']" data.val_data="['/data/validation.parquet']" \\
  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \\
  trainer.placement.colocate_all=COLOCATE \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS trainer.placement.ref_num_gpus_per_node=$NUM_GPUS \\
  generator.inference_engine.num_engines=ENGINES generator.inference_engine.tensor_parallel_size=1 \\
  trainer.epochs=20 trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256
"""
RLINF: dict[str, Any] = {
    "defaults": ["base", "_self_"],
    "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout,reward": "0-7"}},
    "runner": {"max_steps": 50, "seq_length": "${multiply:${data.max_prompt_length},4}", "val_check_interval": -1},
    "algorithm": {"adv_type": "grpo", "kl_beta": 0.0, "ratio_clip_eps": 0.2, "group_size": 16, "n_minibatches": 4},
    "data": {"max_prompt_length": 1024, "train_data_paths": ["/data/a.jsonl"], "answer_key": "solutions"},
    "actor": {"model": {"tensor_model_parallel_size": 4, "precision": "fp16"}, "optim": {"lr": 2e-6}},
    "rollout": {"model": {"model_path": "/models/m"}, "tensor_parallel_size": 2, "rollout_backend": "sglang"},
}


def imported_text(framework: str, text: str, tmp_path: Path, **more: Any) -> Translation:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return imported(framework, [str(path)], **more)


def as_config(found: Translation, tmp_path: Path) -> Config:
    path = tmp_path / "imported.yaml"
    path.write_text(written(found, "a test"))
    return load_config(path)


def test_slime_counts_samples_and_places_engines_behind_the_actor(tmp_path: Path) -> None:
    found = imported_text("slime", SLIME, tmp_path)
    config = as_config(found, tmp_path)
    assert config.placement == {"actor, reference": "0-3", "rollout, reward": "4-7"} and found.world_size == 8
    assert config.batch.mini_batches == 32 * 8 // 128 and config.batch.mini_batches_by == "prompts"
    assert config.actor.optimizer.beta2 == 0.999, "Megatron's default, not rltrain's"
    assert config.actor.optimizer.weight_decay == 0.01
    assert config.loss.normalization == "sequence_mean" and (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert config.loss.kl.estimator == "k3" and config.loss.kl.coef == 0.01 and config.loss.kl.unbiased is False
    assert not config.data.shuffle and config.seed == 42
    assert config.evaluation.sets[0].samples_per_prompt == 16 and config.evaluation.sets[0].sampling.temperature == 1
    assert config.rollout.sglang.args == {"mem_fraction_static": 0.8}
    assert {"hidden-size", "swiglu"} <= {one.key for one in found.leftovers}


def test_what_is_imported_passes_the_dry_run(tmp_path: Path) -> None:
    found = imported_text("slime", SLIME, tmp_path)
    (tmp_path / "imported.yaml").write_text(written(found, "a test"))
    described = describe_job(tmp_path / "imported.yaml", [], DryRunOptions(world_size=8))
    assert "Ranks: 8" in described


def test_verl_has_dual_clip_and_counts_prompts_and_training_steps(tmp_path: Path) -> None:
    found = imported_text("verl", VERL, tmp_path, rows=RowCounts(rows=7473))
    config = as_config(found, tmp_path)
    assert config.steps == 15 * (7473 // 1024)
    assert config.loss.dual_clip == 3.0 and config.loss.normalization == "token_mean"
    assert config.batch.mini_batches == 4 and config.batch.mini_batches_by == "prompts"
    assert config.actor.optimizer.warmup_steps == 10 * 4, "verl's learning rate follows training steps"
    assert config.placement == {"actor, reference, rollout, reward": "0-7"}
    assert config.loss.kl.coef == 0.001 and config.loss.kl.estimator == "k3" and config.loss.kl.unbiased is False
    assert config.data.train.label_key == "reward_model.ground_truth"
    assert config.data.eval is not None and config.evaluation.interval == 5
    assert config.model.recomputed.granularity == "full" and config.rollout.sampling.max_response_tokens == 1024


def test_skyrl_has_a_kl_penalty_by_default(tmp_path: Path) -> None:
    text = SKYRL.replace("COLOCATE", "true").replace("ENGINES", "4")
    config = as_config(imported_text("skyrl", text, tmp_path, rows=RowCounts(rows=7473)), tmp_path)
    assert config.placement == {"actor, reference, rollout, reward": "0-3"}
    assert config.loss.kl.coef == 0.001 and config.batch.samples_per_prompt == 5
    assert config.steps == 20 * 7 and config.seed == 42 and config.loss.dual_clip is None
    apart = SKYRL.replace("COLOCATE", "false").replace("ENGINES", "2")
    config = as_config(imported_text("skyrl", apart, tmp_path, rows=RowCounts(rows=7473)), tmp_path)
    assert config.placement == {"actor, reference": "0-3", "rollout, reward": "4-5"}


def test_rlinf_reads_hydra_with_interpolations_and_any_placement(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("runner: {max_steps: 1, save_interval: 10}\ndata: {rollout_batch_size: 128}\n")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RLINF))
    found = imported("rlinf", [str(path), "runner.max_steps=60"])
    config = as_config(found, tmp_path)
    assert config.steps == 60 and config.checkpoint.save_interval == 10 and config.batch.prompts_per_step == 128
    assert config.placement == {"actor, rollout, reward": "0-7"} and config.rollout.max_context_tokens == 4096
    assert config.model.dtype == "float16" and config.batch.mini_batches == 4


def test_rlinfs_guard_of_megatron_is_set_where_it_can_bind(tmp_path: Path) -> None:
    def found(bound: float, backend: str) -> Translation:
        algorithm = {**RLINF["algorithm"], "early_stop_imp_ratio": bound, "val_rollout_batch_size_per_gpu": 4}
        model = {"tensor_model_parallel_size": 4, "precision": "fp32" if backend == "fsdp" else "fp16"}
        actor = {**RLINF["actor"], "training_backend": backend, "model": model}
        data = {**RLINF["data"], "rollout_batch_size": 128}
        algorithm |= {"entropy_bonus": 0.1, "calculate_entropy": False}
        values = {**RLINF, "defaults": [], "algorithm": algorithm, "actor": actor, "data": data}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        return imported("rlinf", [str(tmp_path / "run.yaml")])

    assert found(5.0, "megatron").get("on_divergence.max_ratio") == 5
    for translation in (found(5.0, "fsdp"), found(1e9, "megatron")):
        assert {"algorithm.early_stop_imp_ratio", "algorithm.val_rollout_batch_size_per_gpu"} <= {
            one.key for one in translation.leftovers
        }
        assert translation.get("loss.entropy_coef") == 0, "without the entropy there is no bonus"


@pytest.mark.parametrize(
    ("framework", "text", "told"),
    [
        (
            "slime",
            SLIME.replace("--rollout-num-gpus 4", "--rollout-num-gpus 3"),
            "must be divisible by rollout_num_gpus_per",
        ),
        ("slime", SLIME.replace("--rollout-num-gpus 4", ""), "rollout-num-gpus is required"),
        ("slime", SLIME.replace("--attention-dropout 0.0", ""), "no dropout here"),
        ("slime", SLIME.replace("128\n", "100\n"), "not a multiple of global_batch_size"),
        ("slime", SLIME.replace("--use-kl-loss", "--fp8-format e4m3"), "fp8-format: 'e4m3'"),
        ("slime", "python other.py --x 1", "starts no command of slime"),
        ("verl", VERL, "--rows N"),
        ("verl", VERL.replace("=256", "=300"), "must be divisible by mini batch size"),
        ("verl", VERL.replace("adv_estimator=grpo", "adv_estimator=opo"), "'opo'"),
        ("verl", VERL.replace("$@", "algorithm.of_nobody=3"), "algorithm.of_nobody: 3"),
        ("skyrl", SKYRL.replace("COLOCATE", "true").replace("ENGINES", "2"), "num_rollout_gpus (2) must be the same"),
    ],
)
def test_what_would_differ_or_cannot_be_is_refused(framework: str, text: str, told: str, tmp_path: Path) -> None:
    rows = RowCounts() if "--rows" in told else RowCounts(rows=7473)
    with pytest.raises(ConfigError) as refused:
        imported_text(framework, text, tmp_path, rows=rows)
    assert told in str(refused.value)


def test_differences_can_be_allowed_and_are_told(tmp_path: Path) -> None:
    text = SLIME.replace("--use-kl-loss", "--fp8-format e4m3")
    found = imported_text("slime", text, tmp_path, allow_differences=True)
    assert "BUT CHANGES RESULTS" in written(found, "a test") and "fp8-format: e4m3" in written(found, "a test")


def test_the_command_prints_a_config_with_the_keys_that_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    assert main(["--from", "slime", "--set", "output_dir=runs/x", "--steps", "5", str(tmp_path / "run.sh")]) == 0
    printed = capsys.readouterr().out
    assert "steps: 5   # --steps" in printed and "tp: 2   # tensor-model-parallel-size" in printed
    assert yaml.safe_load(printed)["output_dir"] == "runs/x"
    command = SLIME[SLIME.index("python3 train.py") :].replace("${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]}", "")
    assert main(["--from", "slime", command]) == 2
    assert "refused" in capsys.readouterr().err


def test_rows_are_counted_where_the_file_is_there(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "reward_model": {"ground_truth": "1"}}\n' * 2500)
    text = VERL.replace("$HOME/data/gsm8k/train.parquet", str(rows), 1)
    assert imported_text("verl", text, tmp_path).get("steps") == 15 * 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"actor": "0-7", "rollout": {"node_group": "draw", "placement": "0-7"}}, {"actor": "0-7", "rollout": "8-15"}),
        ({"actor": "0-7:0-7", "rollout": {"node_group": "draw", "placement": "all"}}, {"rollout": "node:1"}),
        ({"actor,rollout": "0-3,5,7"}, {"actor": "0-3,5,7", "rollout": "0-3,5,7"}),
    ],
)
def test_placements_of_rlinf_become_ranks(given: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    groups = [{"label": "train", "node_ranks": "0"}, {"label": "draw", "node_ranks": "1"}]
    cluster = {"num_nodes": 2, "component_placement": given, "node_groups": groups}
    data = {**RLINF["data"], "rollout_batch_size": 128}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RLINF, "defaults": [], "cluster": cluster, "data": data}))
    found = imported("rlinf", [str(tmp_path / "run.yaml")])
    placed = {
        role: setting.value
        for path, setting in found.settings.items()
        if path.startswith("placement.")
        for role in path.removeprefix("placement.").split(", ")
    }
    assert expected.items() <= placed.items() and placed["reward"] == placed["rollout"]


SFT = "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=/data/a.parquet trainer.total_epochs=1"
SHOWN = {
    "slime's script": (SLIME, "slime"),
    "a script that sources a model's": (
        'source "${DIR}/models/qwen3-4B.sh"\npython3 train_async.py --prompt-data a',
        "slime",
    ),
    "verl's script": (VERL, "verl"),
    "verl's supervised training": (SFT, "verl"),
    "verl's program by its file": ("python verl/verl/trainer/main_ppo.py algorithm.adv_estimator=grpo", "verl"),
    "a recipe for verl": ("python -m recipe.dapo.main_dapo +actor_rollout_ref.actor.use_kl_loss=False", "verl"),
    "SkyRL's script": (SKYRL, "skyrl"),
    "SkyRL's older module": ("uv run --isolated -m skyrl_train.entrypoints.main_base trainer.epochs=20", "skyrl"),
    "RLinf's program": (
        "python examples/reasoning/main_grpo.py --config-name a runner.max_steps=5 cluster.num_nodes=2",
        "rlinf",
    ),
}


@pytest.mark.parametrize(("text", "expected"), SHOWN.values(), ids=SHOWN)
def test_what_trainer_a_script_is_for_is_seen_in_it(text: str, expected: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert framework_of([str(script)], {}) == expected
    assert framework_of([text], {}) == expected, "as a command"


def test_what_trainer_a_file_is_for_is_seen_in_its_keys(tmp_path: Path) -> None:
    files = {"rlinf": RLINF, "verl": {"actor_rollout_ref": {"model": {"path": "m"}}}, "skyrl": {"generator": {"n": 1}}}
    for name, keys in files.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(keys))
        assert framework_of([str(path)], {}) == name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "deepspeed --module openrlhf.cli.train_ppo_ray --prompt_data a",
            ["keys of none", "--from verl (verl. or"],
        ),
        (f"{VERL}\n{SKYRL}", ["several", "--from verl (verl.trainer.main_ppo)", "--from skyrl (skyrl.train."]),
    ],
)
def test_a_trainer_that_cannot_be_told_has_to_be_said(
    text: str, told: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert main([str(script)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(part in said for part in told)


def test_what_is_said_of_the_trainer_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL)
    assert main(["--rows", "7473", str(script)]) == 0
    inferred = capsys.readouterr().out
    assert main([str(script), "--rows", "7473"]) == 0 and capsys.readouterr().out == inferred
    assert main([str(script), "--rows", "7473", "--", "trainer.test_freq=3"]) == 0
    assert "interval: 3" in capsys.readouterr().out, "later arguments belong to the script"
    assert main(["--from", "verl", "--rows", "7473", str(script)]) == 0
    assert capsys.readouterr().out == inferred
    assert main(["--from", "slime", str(script)]) == 2
    assert "starts no command of slime" in capsys.readouterr().err
    for source in (["missing.sh"], ["missing"], ["--from", "verl", "a/missing"], ["bash", "-x", "missing"]):
        assert main(source) == 2
        assert f"there is no file {source[-1]} (relative paths start at" in capsys.readouterr().err
    assert main(["bash", "-c", "true"]) == 2 and "it has keys of none" in capsys.readouterr().err
    assert main([]) == 2
    assert "expected a script, a YAML file or a command" in capsys.readouterr().err
    assert main([str(script), "--rows", "many"]) == 2
    assert "argument --rows: invalid int value: 'many'" in capsys.readouterr().err


BASH = shutil.which("bash")


def started(text: str, *arguments: str, **environment: str) -> list[tuple[str, ...]]:
    return [one.arguments for one in read_text(text, "script", arguments, environment).started]


SCRIPTS = [
    "A=1\nrun $A \"$A b\" '$A' \\$A",
    'A=(--x 1 "two words" --y)\nA+=(--z)\nrun "${A[@]}" ${A[2]} ${#A[@]} last',
    "A=(\n  --x 1  # a comment\n  # --y 2\n  --z\n)\nrun ${A[@]} \\\n  --end",
    'A=()\nrun "${A[@]}" ${NOTHING} "${NOTHING}" end',
    "run ${A:-fallback} ${B:=set} $B ${B:+there} ${C:+there} end",
    "P=/a/b/model.tar.gz\nrun ${P##*/} ${P%.gz} ${P#/a} ${P/model/other} ${P//a/A} ${P%%.*} ${P:1:3} ${#P}",
    "N=$((1024 * 2 + 3))\nrun $N $((N / 2)) $(( N % 10 )) $((N > 5 ? 1 : 2)) $((2 ** 10))",
    'for i in 1 2 3; do X="$X$i"; done\nrun $X',
    "for ((i=0; i<4; i++)); do\n  if (( i < 2 )); then a+=(0); else a+=(1); fi\ndone\nrun ${a[@]}",
    'arr=(0 1 1)\nprintf -v F "[%s]" "$(IFS=\', \'; echo "${arr[*]}")"\nrun "$F"',
    'if [ "$X" = "" ] && [[ -z $Y || 3 -gt 5 ]]; then run yes; else run no; fi',
    'case "gpu" in\n  npu) run npu ;;\n  gpu | cuda)\n    run "gpu"\n    ;;\n  *) run other ;;\nesac',
    'f() { local n=$1; run "$n" "$2"; }\nf a "b c"',
    'run $(seq 16 8 40) "$(echo one; echo two)" $(basename /a/b.sh .sh)',
    "run before; { run inside; }; (run sub) ; run a && run b",
    'T="a b"\nrun $T "$T"x y"$T"',
    "run a <<EOF\nnot this\nEOF\nrun after 2>&1",
    'shift\nset -- a "b c"\nrun "$@" $# $2',
    "A=x\nA+=y\nrun $A ${A^^} ${A,,}",
    'KEYS=(a b)\nfor k in "${!KEYS[@]}"; do run $k ${KEYS[$k]}; done',
    "N='3 + 4'; M=-2; run $((N * 2)) $((-M)) $((+M)) $((!M)) $((M && 1)) $((M || 0)) $((0 || 0)) $((!0))",
    "run $((1 - x)) $((07 + 1)) $((5 == 5)) $((4 != 4)) $((9 >= 10))",
    'A[1]=two\nA[0]=zero\nrun "${A[@]}" ${#A[1]}',
    "A=(x y z w)\nrun ${A[@]:1:2} ${A[@]/#/--} ${A[*]:3} ${A[@]/%/.gz} ${A[0]/#x/new}",
    "! false && run a; true && ! false && run b; ! true || run c; if true && ! true | false; then run d; fi",
    "NAMED=A\nA=value\nrun ${!NAMED}",
    'if ! [ "a" = "b" ] && [ ! -f /nowhere ] && [ -n "x" -a "y" ]; then run yes; fi',
    "if [[ ( -n a ) && b == b* && ! c =~ ^d ]]; then run yes; else run no; fi",
    "if [[ abc < abd ]] && [[ b > a ]] && [[ a != b ]]; then run yes; fi",
    'X=1\nunset X Y\nrun "${X-gone}" ${Y-gone}',
    "C='run a b'\neval $C\neval \"X=5; run \\$X\"",
    "f() { run in; return; run never; }\nf; ! false && run after; run `echo old` end",
    "case none in\n  a) run a ;;\nesac\nrun after",
    "run $( (echo nested) ) $(echo a\\)b)",
    "printf -v A '%s-%d' x 3\nprintf -v B\nrun $A $(printf '%s' y)",
    "false || false || run last\nfor one; do run $one; done\nwhile false; do run never; done",
]


@pytest.mark.skipif(BASH is None, reason="needs bash for the comparison")
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_read_is_what_bash_would_start(script: str) -> None:
    printing = "run() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
    done = subprocess.run(["bash", "-c", printing + script], capture_output=True, text=True, check=False, env={})
    expected = [tuple(one.split("\0")[:-1]) for one in done.stdout.split("\1")[:-1]]
    assert [one[1:] for one in started(script) if one[0] == "run"] == expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0\r\n"), max_size=8), max_size=4))
def test_quoted_words_stay_as_they_are(words: list[str]) -> None:
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    assert started(f"run {quoted}") == [("run", *words)]


def test_programs_are_not_run_and_their_output_is_marked(tmp_path: Path) -> None:
    made = tmp_path / "made"
    ((_, value, known),) = started(f"touch_ $(touch {made}; nvidia-smi | wc -l) $(date +%Y)x")
    assert UNKNOWN in value and UNKNOWN in known and known.endswith("x")
    assert not made.exists()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('if [ "$(whoami)" = x ]; then run a; else run b; fi', "b"),
        ('[[ "$(date)" ]] && run a || run b', "b"),
        ('[ -f "$(tool)" ] && run a || run b', "b"),
        ('[[ a =~ "(" ]] && run a || run b', "b"),
        ("case $(uname) in Linux) run a ;; *) run b ;; esac", "b"),
        ("for x in $(tool); do run a; done; run b", "b"),
    ],
)
def test_what_depends_on_a_program_does_not_hold(script: str, expected: str) -> None:
    assert [one[1] for one in started(script) if one[0] == "run"] == [expected]


def test_values_that_cannot_be_known_are_marked() -> None:
    script = "N=$(tool)\nrun $((N + 1)) ${X:?is missing} ${X@Q} ${1a} $((2 +* 3)) $(seq a b) $((1, 2)) $(cat file)"
    (found,) = [one for one in started(script) if one[0] == "run"]
    assert len(found) == 9 and all(UNKNOWN in value for value in found[1:])


def test_a_script_can_run_another(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text("MODEL=$1\nrun $MODEL\nexit 0\nrun never\n")
    other = tmp_path / "inner.sh"
    assert started(f"MODEL=outer\nbash {other} inner\nrun $MODEL") == [("run", "inner"), ("run", "outer")]
    assert started("bash missing.sh") == [("bash", "missing.sh")]


def test_hardware_that_is_looked_for_is_not_there() -> None:
    script = 'D=$(python3 -c "import torch_npu" 2>/dev/null && echo npu || echo gpu)\nrun $D'
    assert started(script) == [("run", "gpu")]
    assert started("if nvidia-smi; then run a; else run b; fi")[-1] == ("run", "b")


def test_sourced_files_lie_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL=(--layers 4)")
    script = tmp_path / "run.sh"
    script.write_text('D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/models/m.sh"\n')
    reading = read_text(script.read_text() + "run ${MODEL[@]}", str(script), (), {})
    assert [one.arguments for one in reading.started] == [("run", "--layers", "4")]


@pytest.mark.parametrize(
    "script",
    [
        "run 'open",
        'run "open',
        "if true; then",
        "a=(1 2",
        "done",
        "while true; do x=1; done",
        "run $(open",
        "((1 + 2)",
        "for ((i=0; i<4)); do run; done",
        "[[ -n a",
        "run a(b",
        "f() { f; }; f",
    ],
)
def test_what_is_no_script_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="script"):
        read_text(script, "script", (), {})


@settings(max_examples=50, deadline=None)
@given(st.text("ab$(){}[]\"'`;&|<>#\\ \n=!", max_size=30))
def test_nothing_but_a_message_comes_of_nonsense(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_text(text, "script", (), {})


COMMAND = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2
 --hf-checkpoint MODEL --prompt-data /data/a.jsonl --input-key prompt --label-key label --rm-type math --num-rollout 9
 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-max-prompt-len 1024
 --attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size 2 --use-dynamic-batch-size
 --max-tokens-per-gpu 32768 --sglang-mem-fraction-static 0.7"""
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "tie_word_embeddings": False,
}
OF_MEMORY = {
    "model.recompute",
    "model.activation_offload",
    "actor.micro_batch_tokens",
    "actor.optimizer.cpu_offload",
    "rollout.sglang.args",
}


def found_of(model: Path, gpu: str | None = None) -> Translation:
    return imported("slime", [COMMAND.replace("MODEL", str(model)).replace("\n", " ")], gpu=gpu)


def test_an_import_fits_by_settings_of_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    gpu = gpu_named("h100")
    plain, fitted = found_of(tmp_path, "none"), found_of(tmp_path, "h100")
    before, after = peak_bytes(plain, {}, gpu), peak_bytes(fitted, {}, gpu)
    assert before is not None and after is not None and after <= gpu.usable_bytes < before
    changed = {path for path in fitted.settings if fitted.settings[path] != plain.settings.get(path)}
    assert changed and changed <= OF_MEMORY
    assert all("--gpu h100: memory only" in fitted.settings[path].origin for path in changed)
    roomy = found_of(tmp_path, "b200")
    assert roomy.settings == plain.settings, "settings that fit stay unchanged"
    assert found_of(tmp_path).settings == fitted.settings, "the default GPU is an H100"


def test_without_the_models_shape_nothing_can_be_chosen() -> None:
    with pytest.raises(ConfigError, match="there is no /models/m/config.json"):
        found_of(Path("/models/m"), "h100")
    assert any("memory settings are those of the source" in note for note in found_of(Path("/models/m")).notes)


def test_experts_are_dealt_out_over_more_ranks_where_nothing_else_helps(tmp_path: Path) -> None:
    of_experts = {"model_type": "qwen3_moe", "num_experts": 256, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    sizes = {"num_hidden_layers": 4, "moe_intermediate_size": 12288, "norm_topk_prob": True, "mlp_only_layers": []}
    shape = SHAPE | of_experts | sizes
    (tmp_path / "config.json").write_text(json.dumps(shape))
    text = COMMAND.replace("--actor-num-nodes 1", "--actor-num-nodes 4").replace("engine 2", "engine 16")
    text = text.replace("MODEL", f"{tmp_path} --expert-model-parallel-size 4").replace("\n", " ")
    fitted = imported("slime", [text])
    assert fitted.get("actor.parallel.ep") > 4
    held = peak_bytes(fitted, {}, gpu_named("h100"))
    assert held is not None and held <= gpu_named("h100").usable_bytes


KEYS = set(all_keys())


def is_key(path: str) -> bool:
    return path in KEYS or path.startswith("rollout.sglang.args.")  # SGLang's own


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_page_is_what_the_rules_make(framework: str) -> None:
    found = (FOLDER / f"{framework}.md").read_text()
    assert found == page(framework), "run: python -m rltrain.import_config.pages"
    assert found.count("\n| `") > 30, "the tables of the page have the rules"


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "trl"])
def test_the_keys_that_a_page_names_here_exist(framework: str) -> None:
    written_by_hand, _, _ = (FOLDER / f"{framework}.md").read_text().partition("<!-- one_to_one -->")
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", written_by_hand, re.MULTILINE)
    named = [key for _, here in rows for key in re.findall(r"`([a-z_]+\.[a-z_0-9.]+)(?=[:`])", here)]
    assert len(named) >= 2
    assert [key for key in named if not key.endswith(".py") and not is_key(key)] == []


def test_every_framework_that_imports_has_a_page() -> None:
    assert set(PAGES) == set(FRAMEWORKS)
    assert all([*modules_of(framework)] for framework in PAGES)
