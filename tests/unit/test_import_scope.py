"""Tests of the set of launch scripts behind the share of imports."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from measure_import import generates_by_its_own, outside  # noqa: E402

from rltrain.import_config.sources import FRAMEWORKS  # noqa: E402

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/data/a.parquet "
SKYRL = "python -m PROGRAM data.train_data=/data/a.parquet trainer.epochs=1 "
COUNTED = None
SCRIPTS = [
    ("verl", VERL + "actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.device=cuda", COUNTED),
    ("verl", VERL + "actor_rollout_ref.model.path=Qwen/Qwen3-VL-8B-Instruct", COUNTED),
    ("verl", VERL + "data.image_key=images", COUNTED),
    ("verl", VERL + "actor_rollout_ref.model.path=openbmb/MiniCPM-o-2_6", "on audio or video"),
    ("verl", VERL + "trainer.device=npu", "on NPUs"),
    ("verl", "export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1\n" + VERL, "on NPUs"),
    ("verl", VERL + "model_engine=veomni", "by a trainer other than FSDP and Megatron"),
    ("skyrl", SKYRL.replace("PROGRAM", "skyrl.train.entrypoints.main_generate"), "generates, and trains nothing"),
    ("skyrl", SKYRL.replace("PROGRAM", "main") + "trainer.num_dummy_steps=5", "on made-up data or steps"),
    ("slime", "exit 1\npython3 train.py \\\n  --rollout-batch-size 32", COUNTED),
    ("slime", "# trainer.epochs\npython3 serve.py --port 80", "starts no training"),
]


@pytest.mark.parametrize(("framework", "text", "reason"), SCRIPTS)
def test_a_scripts_own_keys_say_whether_it_is_counted(
    framework: str, text: str, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert outside(FRAMEWORKS[framework], str(tmp_path / "run.sh"), []) == reason


@pytest.mark.parametrize("own", [True, False])
def test_a_program_may_bring_a_generator_of_its_own(own: bool, tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "agent"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text("class Own(Base):\n    def get_generator(self): ...\n" if own else "main()\n")
    (folder / "run.sh").write_text(SKYRL.replace("PROGRAM", "examples.agent.main"))
    assert generates_by_its_own(FRAMEWORKS["skyrl"], str(folder / "run.sh"), []) is own
