"""Scripts of other trainers for models that see: the tower, columns of images, limits of pixels, and engines."""

from pathlib import Path

import pytest
import yaml

from rltrain.errors import ConfigError
from rltrain.import_config.command import imported
from rltrain.import_config.translation import Translation
from tests.unit.test_import_features import SKYRL, SLIME, config_of, found_of

SEEING = "/models/Qwen2.5-VL-7B-Instruct"
SERVED_ALONE = "actor_rollout_ref.rollout.tensor_model_parallel_size=1 "


def test_a_model_named_after_seeing_gets_its_tower(tmp_path: Path) -> None:
    config = config_of(found_of("verl", SERVED_ALONE, SEEING), tmp_path)
    assert config.model.vision is not None and config.model.vision.train
    assert config.rollout.engine == "sglang" and config.data.train.parts()[0].images_key == "images"
    assert config_of(found_of("verl", SERVED_ALONE, "/VL/Qwen3-8B"), tmp_path).model.vision is None


def test_a_column_of_images_is_that_of_evaluations_too(tmp_path: Path) -> None:
    more = "data.image_key=pictures data.val_files=/data/b.parquet data.max_pixels=200704 trainer.test_freq=3"
    config = config_of(found_of("verl", more, SEEING), tmp_path)
    assert config.data.train.parts()[0].images_key == config.data.eval.images_key == "pictures"
    assert config.data.images.max_pixels == 200704


def test_a_frozen_tower_stays_frozen(tmp_path: Path) -> None:
    config = config_of(found_of("verl", "actor_rollout_ref.actor.freeze_vision_tower=True", SEEING), tmp_path)
    assert config.model.vision is not None and not config.model.vision.train
    text = found_of("verl", "actor_rollout_ref.actor.freeze_vision_tower=True")
    assert "model.vision.train" not in text.settings, "a model of texts has no tower"


def test_wide_engines_of_models_that_see_are_embedded(tmp_path: Path) -> None:
    found = found_of("verl", "", SEEING)
    config = config_of(found, tmp_path)
    assert config.rollout.engine == "embedded" and config.parallel_of("rollout")[0].tp == 2
    assert found.settings["rollout.engine"].origin == "vllm: rltrain's engine instead, as SGLang splits towers"
    assert "mem_fraction_static" in [one.key for one in found.leftovers]


def slime_of(more: str) -> Translation:
    return found_of("slime", f"--rollout-num-gpus-per-engine 1 {more}", "/models/Qwen3.5-35B-A3B")


def test_slimes_map_of_media_has_the_column(tmp_path: Path) -> None:
    held_out = "--eval-prompt-data geo /data/b.jsonl --eval-interval 5"
    config = config_of(slime_of(f"""--multimodal-keys '{{"image": "pictures"}}' {held_out}"""), tmp_path)
    assert config.model.vision is not None
    assert config.data.train.parts()[0].images_key == "pictures"
    assert [one.data.images_key for one in config.evaluation.sets] == ["pictures"]
    assert config_of(slime_of(""), tmp_path).model.vision is None, "it is trained on texts"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("""'{"video": "films"}'""", "multimodal-keys: .*video: only images can be shown here"),
        ("images", "a JSON object was expected"),
    ],
)
def test_other_media_of_slime_are_refused(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        slime_of(f"--multimodal-keys {given}")


def test_skyrls_generator_of_models_that_see(tmp_path: Path) -> None:
    config = config_of(found_of("skyrl", "generator.vision_language_generator=true"), tmp_path)
    assert config.model.vision is not None


def test_an_environment_registered_by_a_program_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text('register(id="geometry", entry_point="geometry.env:Geometry")\n')
    text = SKYRL.replace("-m skyrl.train.entrypoints.main_base", "main.py").replace("MODEL", "/models/m")
    (tmp_path / "run.sh").write_text(text.replace("\n", " ").replace("MORE", "environment.env_class=geometry"))
    found = imported("skyrl", [str(tmp_path / "run.sh")])
    assert found.get("env.function") == "geometry.env:Geometry"


def test_a_sourced_file_finds_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/base.sh").write_text("ARGS=(--lr 3e-6 --min-lr 1e-7)\n")
    (tmp_path / "models/own.sh").write_text(
        'source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/base.sh"\nARGS[1]=5e-6\n'
    )
    text = SLIME.replace("MODEL", "/models/m").replace("\n", " ").replace("MORE", "${ARGS[@]}")
    (tmp_path / "run.sh").write_text(f'source "$(dirname "$0")/models/own.sh"\n{text}\n')
    found = imported("slime", [str(tmp_path / "run.sh")])
    assert (found.get("actor.optimizer.lr"), found.get("actor.optimizer.min_lr")) == (5e-6, 1e-7)


RLINF = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout,reward": "0-7"}},
    "runner": {"max_steps": 5, "seq_length": 2048},
    "algorithm": {"group_size": 8, "adv_type": "grpo", "recompute_logprobs": True},
    "rollout": {"rollout_backend": "sglang", "tensor_parallel_size": 1},
    "data": {"rollout_batch_size": 64, "max_prompt_length": 1024, "prompt_key": "prompt", "answer_key": "answer"},
    "actor": {"training_backend": "fsdp", "global_batch_size": 512, "optim": {"lr": 1e-6}},
}


def rlinf_of(folder: Path, columns: list[str], kind: str) -> Translation:
    model = {"model_type": kind, "model_path": SEEING}
    config = {**RLINF, "data": {**RLINF["data"], "image_keys": columns, "train_data_paths": ["/data/a.jsonl"]}}
    config["actor"] = {**RLINF["actor"], "model": model}
    config["rollout"] = {**RLINF["rollout"], "model": model}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return imported("rlinf", [str(folder / "run.yaml")], allow_differences=True)


def test_rlinfs_columns_of_images(tmp_path: Path) -> None:
    found = rlinf_of(tmp_path, ["picture"], "qwen2.5_vl")
    assert found.get("data.train.images_key") == "picture" and found.get("model.vision") == {}
    found = rlinf_of(tmp_path, ["left", "right"], "qwen2.5_vl")
    assert [one.reason for one in found.differences if one.key == "data.image_keys"] == [
        "all images of a row are in one column here"
    ]
    assert not rlinf_of(tmp_path, [], "qwen2.5_vl").differences


@pytest.mark.parametrize("kind", ["openvla_oft", "openpi", "pi05", "gr00t", "mlp_policy"])
def test_models_with_heads_of_their_own_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"actor.model.model_type is {kind}, which is no language model"):
        rlinf_of(tmp_path, [], kind)
