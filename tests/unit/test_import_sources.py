"""Sources of imports: Hydra's files, values that are no such values, and the memory of a result's engine."""

import json
from pathlib import Path

import pytest

from rltrain.cli.main import run_script
from rltrain.config.loader import load_config
from rltrain.errors import ConfigError
from rltrain.import_config.command import imported, peak_bytes
from rltrain.import_config.sources import read_config
from rltrain.import_config.translation import RowCounts
from rltrain.planning.hardware import gpu_named
from tests.unit.test_import_config import SHAPE
from tests.unit.test_import_features import SKYRL, SLIME, VERL, found_of


def write(folder: Path, **texts: str) -> Path:
    """Writes files named `group__name` or `name`, and returns the path of run.yaml."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "run.yaml"


def test_defaults_of_hydra_lie_in_folders_and_packages(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        run="""
defaults:
  - model: small
  - optional data@rows: talks
  - override hydra/launcher: slurm
  - logging: null
  - plain@_global_
  - missing
actor: {lr: 2}
""",
        model__small="{size: 1, lr: 1}",
        data__talks="path: /a",
        plain="{top: 7, actor: {lr: 1, decay: none}}",
    )
    values, missing = read_config(path, {}, ["model.more.deep=3"])
    assert values == {
        "model.size": 1,
        "model.lr": 1,
        "model.more.deep": 3,
        "rows.path": "/a",
        "top": 7,
        "actor.lr": 2,
        "actor.decay": "none",
    }
    assert missing == ["missing.yaml, a default of run.yaml"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("${oc.env:FOLDER}", "/home"),
        ("${oc.env:NOWHERE,5}", 5),
        ("${oc.env:NOWHERE}", "$<oc.env:NOWHERE>"),
        ("${oc.select:a.b,9}", 4),
        ("${oc.select:a.c,9}", 9),
        ("${a.c}", "$<a.c>"),
        ("${add:${a.b},3}", 7),
        ("${int_div:${a.b},0}", 0),
        ("${now:%H}", "$<now:%H>"),
        ("${.b}x${a.b}", "4x4"),
    ],
)
def test_interpolations(expression: str, expected: object, tmp_path: Path) -> None:
    path = write(tmp_path, run=f"a: {{b: 4, found: '{expression}'}}")
    assert read_config(path, {"FOLDER": "/home"}, [])[0]["a.found"] == expected


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("a: [", [], "cannot be read as YAML"),
        ("- a", [], "expected keys with values at the top level"),
        ("a: 1", ["a"], "'a' is not an override; expected key=value"),
        ("{a: '${b}', b: '${a}'}", [], "its interpolations refer to each other"),
    ],
)
def test_what_is_no_config_is_refused(text: str, overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(write(tmp_path, run=text), {}, overrides)


@pytest.mark.parametrize(
    ("framework", "more", "said"),
    [
        ("slime", "--rollout-batch-size 2.5", "a whole number was expected"),
        ("slime", "--use-kl-loss maybe", "true or false was expected"),
        ("slime", "--num-gpus-per-node null", "a number was expected"),
        ("slime", "--lr $(tool)", "lr: .*it is not a number known without running the source"),
        ("slime", "--lr-decay-style wsd", "lr-decay-style: 'wsd': learning rates here: constant, linear, cosine"),
        ("slime", "--actor-num-gpus-per-node 0", "no rank is left"),
        ("verl", "actor_rollout_ref.actor.optim.betas=[0.9]", "two numbers were expected"),
        ("verl", "data.val_files=[1,2]", "a file or a list of files was expected"),
    ],
)
def test_values_of_another_kind_are_refused(framework: str, more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found_of(framework, more)


def test_flags_have_truth_values_in_words() -> None:
    template = [found_of("slime", f"--apply-chat-template {word}").get("data.chat_template") for word in ("yes", "off")]
    assert template == ["auto", "never"]


def test_a_longer_evaluation_needs_a_longer_context() -> None:
    keys = "data.val_data=/data/v.parquet generator.eval_sampling_params.max_generate_length=4096"
    found = found_of("skyrl", keys)
    assert found.get("rollout.max_context_tokens") == 512 + 4096


def test_epochs_without_rows_keep_the_given_steps(tmp_path: Path) -> None:
    text = SKYRL.replace("MODEL", "/models/m").replace("\n", " ").replace("MORE", "")
    epochs = text.replace("trainer.epochs=null", "trainer.epochs=3")
    found = imported("skyrl", [epochs])
    assert found.get("steps") == 9 and "may end the run earlier" in found.settings["steps"].origin
    assert imported("skyrl", [epochs], rows=RowCounts(rows=128)).get("steps") == 3 * 2, "the epochs end first"
    with pytest.raises(ConfigError, match="gives neither trainer.max_training_steps nor trainer.epochs"):
        imported("skyrl", [text.replace("max_training_steps=9", "max_training_steps=null")], rows=RowCounts(rows=128))
    broken = tmp_path / "a.parquet"
    broken.write_text("no rows")
    with pytest.raises(ConfigError, match="cannot be counted; expected --rows N"):
        imported("verl", [text_of_epochs(broken)])


def text_of_epochs(data: Path) -> str:
    text = VERL.replace("MODEL", "/models/m").replace("\n", " ").replace("/data/a.parquet", str(data))
    return text.replace("trainer.total_training_steps=9", "").replace("MORE", "")


def test_of_several_trainings_the_first_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    first = SLIME.replace("MODEL", "/models/m").replace("\n", " ").replace("MORE", "")
    script.write_text(f"{first}\npip install a==1.0\n{first.replace('--num-rollout 9', '--num-rollout 10')}\n")
    found = imported("slime", [str(script)])
    assert found.get("steps") == 9
    assert "the script starts 2 trainings, this is the first (lines 1, 3)" in found.notes


def test_the_result_is_written_to_a_file_and_has_to_be_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = VERL.replace("MODEL", "/models/m").replace("\n", " ").replace("MORE", "")
    target = tmp_path / "job.yaml"
    assert run_script("import-config", ["--from", "verl", "--output", str(target), text]) == 0
    assert capsys.readouterr().out == "" and load_config(target).batch.prompts_per_step == 64
    with pytest.raises(ConfigError, match=r"the result is not a valid config:\n  rollout\.sampling\.top_p: .*greater"):
        imported("verl", [f"{text} actor_rollout_ref.rollout.top_p=-1"])


def test_a_job_with_the_embedded_engine_fits_too(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    sizes = {"moe_intermediate_size": 3584, "norm_topk_prob": True, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | experts | sizes))
    keys = "actor_rollout_ref.rollout.expert_parallel_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True"
    text = VERL.replace("MODEL", str(tmp_path)).replace("\n", " ").replace("MORE", keys)
    plain, fitted = (imported("verl", [text], gpu=gpu) for gpu in ("none", "h100"))
    assert plain.get("rollout.engine") == "embedded" and plain.get("rollout.parallel.ep") == 2
    gpu = gpu_named("h100")
    before, after = peak_bytes(plain, {}, gpu), peak_bytes(fitted, {}, gpu)
    assert before is not None and after is not None and after <= gpu.usable_bytes < before
    changed = [path for path, one in fitted.settings.items() if one != plain.settings.get(path)]
    assert changed and all("--gpu h100: memory only" in fitted.settings[path].origin for path in changed)
