"""Weights of vision-language models sent to a running SGLang server, against transformers with these weights."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import read_architecture
from rltrain.models.vision import PlacedImage, Tower
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.server_images import ServerImages
from rltrain.rollout.servers.sglang_process import Server
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from tests.sglang.servers import NARROW, PART_BYTES, call, connected, loaded_by_sglang, started
from tests.support.counting_images import GRPO
from tests.support.jobs import column, succeed, train
from tests.support.torchrun import run_distributed
from tests.support.vision_checkpoints import (
    IMAGE_TOKEN,
    VISION_END,
    VISION_START,
    load_model,
    model_inputs,
    tiny_vision,
    write_checkpoint,
)

PATCH = 14
"""Height and width of a patch in pixels. SGLang supports no other for Qwen2.5-VL."""
FFN = 64
"""Feed-forward units of the tower. On CPUs SGLang pads them to a multiple of 64."""
WIDE = dict.fromkeys(NARROW, 128)
"""Sizes of the language model's MLPs and experts that two ranks of SGLang need not pad."""
POSITIONS = 64
"""Learned positions of the tower. SGLang pads them like a vocabulary."""
TIMEOUT_S = 800


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_weights_with_a_tower_are_served(kind: Tower, start_server: Callable[..., Server], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, folder in enumerate((first, second)):
        positions = {} if kind == "qwen2_5_vl" else {"num_position_embeddings": POSITIONS}
        write_checkpoint(folder, kind, seed=seed, patch=PATCH, intermediate_size=FFN, **positions)
    layout = engine_layout(read_architecture(first, sees=True), Grid((0,)), sglang=True)
    server = start_server(first, needs_tokenizer=True)
    with connected(server) as client:
        parts = split(layout, PART_BYTES)
        delivery = Delivery(parts, 0, device=torch.device("cpu"), keep=True, group=None, call=client.call)
        delivery.check_layout()
        for version, folder in enumerate((first, second), start=1):
            delivery.begin()
            for number, part in enumerate(parts):
                load_parameters(folder, part, 0, delivery.tensors(number))
                delivery.arrived(number, verify=True)
            delivery.finish(version)
            call(server, "/flush_cache", {})
            assert_serves(server, folder, kind, tmp_path)
        delivery.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_both_ranks_of_a_server_hold_the_whole_tower(
    kind: Tower, start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameters equal those of SGLang's own load, and log-probs after an image those of transformers."""
    first, second = folders = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(folders):
        positions = {} if kind == "qwen2_5_vl" else {"num_position_embeddings": POSITIONS}
        write_checkpoint(folder, kind, seed=seed, patch=PATCH, text=WIDE, intermediate_size=FFN, **positions)
    server = started(start_server, monkeypatch, first, 2, needs_tokenizer=True, whole_tower=True)
    expected = [loaded_by_sglang(server, folder) for folder in folders]
    options = {"checkpoints": [*map(str, folders)], "sees": True, "direct": True}
    told = {"url": server.url, "token": server.token, **options}
    found, _ = run_distributed("tests.sglang.loading_ranks:send_in_turn", 2, told)
    assert found == expected
    call(server, "/flush_cache", {})
    assert_serves(server, second, kind, tmp_path)
    server.kill()


@pytest.mark.parametrize(
    "of_tower", [["weight_sync.verify=true"], ["model.vision={train: false}"]], ids=["trained", "frozen"]
)
def test_a_job_trains_on_images(of_tower: list[str], sglang_python: str, tmp_path: Path) -> None:
    """Log-probs of the engine's tokens equal the actor's after every update of language model and tower. A frozen tower
    comes to the server once."""
    make = [sys.executable, "tools/make_counting.py", "--output", str(tmp_path / "rows")]
    succeed(make, 120)
    write_checkpoint(tmp_path / "model", "qwen2_5_vl", patch=PATCH, intermediate_size=FFN)
    rows = [f"data.{name}.path={tmp_path}/rows/{name}.jsonl" for name in ("train", "eval")]
    short = ["data.max_prompt_tokens=64", "rollout.max_context_tokens=80", "rollout.sampling.max_response_tokens=8"]
    learning = ["actor.optimizer={lr: 1.0e-2, warmup_steps: 0}", "loss.entropy_coef=1.0"]
    batch = "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}"
    engine = ["rollout.engine=sglang", f"rollout.sglang.python={sglang_python}", *of_tower]
    of_model = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/job"]
    job = [*of_model, *rows, *short, *learning, batch, *engine, "steps=3", "data.eval.max_rows=4"]
    records = train(GRPO, *job, num_ranks=1, timeout_s=TIMEOUT_S)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == 3 and max(differences) <= 1e-4
    assert all(tokens > 0 for tokens in column(records, "images/tokens"))


def assert_serves(server: Server, folder: Path, kind: Tower, store_folder: Path) -> None:
    """Asserts that the log-prob of a token after an image is that of transformers."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, 56, 84, 3), np.uint8)
    store = ImageStore(store_folder, 0, keep_steps=1, cache_bytes=1e9)
    store.put(7, pixels, 0)
    placed = PlacedImage(2, 7, (1, 56 // PATCH, 84 // PATCH))
    merge = tiny_vision(kind).merge
    ids = [40, VISION_START, *[IMAGE_TOKEN] * placed.num_tokens(merge), VISION_END, 41]
    body = {
        **ServerImages(store, merge).fields([Sample(0, tuple(ids), seed=0, images=(placed,))]),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
    }
    (answer,) = call(server, "/generate", body)
    with torch.no_grad():
        last = load_model(folder)(**model_inputs(folder, ids, [pixels])).logits[0, -1].log_softmax(-1)
    assert answer["output_ids"] == [int(last.argmax())]
    assert answer["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(float(last.max()), abs=1e-4)
