"""Trains a tiny dense model on two ranks, and runs one with experts and latent attention, without one patch of
training.platform at a time.

    python cases_platform.py RESULTS_FILE

Patches last for a process. So each attempt has its own processes, forked after the import of megatron-core.
"""

import json
import multiprocessing
import sys
import tempfile
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import MLA, Architecture, ExpertLayers, YarnScaling
from rltrain.runtime.grid import Grid
from rltrain.training.megatron import platform
from rltrain.training.megatron.backend import EvaluableModel, TrainableModel
from rltrain.training.megatron.model import LanguageModel
from tests.distributed.cases_training import negative_log_likelihood
from tests.support.packed_experience import plain_experience
from tests.support.trained_models import blank_model, groups_on

# Together these need every patch: tied embeddings under pipelining, bf16, recomputation, two ranks. The others have
# latent attention, with experts divided among the ranks, experts cut over them, and cut sequences.
GRID = Grid((0, 1), pp=2)
EXPERT_GRIDS = (Grid((0, 1), ep=2), Grid((0, 1), etp=2), Grid((0, 1), cp=2))
ARCHITECTURE = Architecture(
    family="qwen3",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_hidden_size=32,
    vocab_size=15,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_positions=64,
    eos_token_ids=(1,),
)
EXPERT_ARCHITECTURE = replace(
    ARCHITECTURE,
    family="deepseek_v3",
    num_kv_heads=2,
    head_dim=12,
    tied_embeddings=False,
    qk_norm=False,
    moe=ExpertLayers(num_experts=4, top_k=2, ffn_hidden_size=16, score="sigmoid"),
    rope_scaling=YarnScaling(4.0, 32.0, 1.0, 1.0, 0.5, original_max_positions=16),
    mla=MLA(q_rank=8, kv_rank=8, plain_head_dim=8, rope_head_dim=4, value_head_dim=8),
)
ATTEMPTS = ("none", *(patch.__name__ for patch in platform.PATCHES))


def attempt_without(patch: str) -> str:
    """Returns the first error of two ranks without `patch`, or "done"."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(2):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, patch, f"{folder}/store", sender))
            process.start()
            receivers.append(receiver)
            processes.append(process)
        outcomes = []
        while len(outcomes) < 2 and not any(outcome != "done" for outcome in outcomes):
            for receiver in multiprocessing.connection.wait(receivers, timeout=60) or [None]:
                if receiver is None:
                    outcomes.append("nothing in 60 s")
                else:
                    outcomes.append(receiver.recv())
                    receivers.remove(receiver)
        for process in processes:  # the other rank may wait for the one that failed
            process.kill()
            process.join()
    return next((outcome for outcome in outcomes if outcome != "done"), "done")


def _rank(rank: int, patch: str, store: str, sender: Connection) -> None:
    platform.PATCHES = tuple(p for p in platform.PATCHES if p.__name__ != patch)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        _train_one_step()
        _run_experts()
        sender.send("done")
    except Exception:
        sender.send(traceback.format_exc())


def _train_one_step() -> None:
    trainable = TrainableModel(_model(ARCHITECTURE, GRID), schema.Actor(), total_updates=1)
    trainable.train_batch(_experience(), negative_log_likelihood)


def _run_experts() -> None:
    for grid in EXPERT_GRIDS:
        experience = _experience().select(torch.tensor([dist.get_rank() if grid.cp == 1 else 0]))
        EvaluableModel(_model(EXPERT_ARCHITECTURE, grid)).evaluate(experience, max_tokens=100)


def _model(architecture: Architecture, grid: Grid) -> LanguageModel:
    settings = {"architecture": architecture, "dtype": "bfloat16", "recompute": "full"}
    model = blank_model(Path("unused"), grid, groups_on([grid]), **settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def _experience() -> Experience:
    return plain_experience([3, 4], torch.arange(7), torch.tensor([False, True, True, False, True, True, True]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps({patch: attempt_without(patch) for patch in ATTEMPTS}))
