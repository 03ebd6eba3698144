"""The ranks of test_values: value models in several parallel layouts, compared with transformers."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rltrain.algorithms.losses import before_tokens, sample_scores
from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.data.experience import Experience
from rltrain.models import read_architecture
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import EvaluableModel, run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.packing import MicroBatch
from tests.support.packed_experience import plain_experience
from tests.support.tiny_checkpoints import CHECKPOINTS, SHAPE, VOCAB_SIZE
from tests.support.trained_models import blank_model, groups_on, of_replica

NAMES = {"qwen3": 2, "qwen2_tied": 4, "llama3": 2}
"""Checkpoints and their numbers of layers: a stage of a pipeline has one or two."""
GRIDS = {
    "tp1": Grid((0,)),
    "tp2": Grid((0, 1), tp=2),
    "tp2_sp": Grid((0, 1), tp=2),
    "pp2": Grid((0, 1), pp=2),
    "dp2": Grid((0, 1)),
}
COMBINATIONS = {"qwen3": tuple(GRIDS), "qwen2_tied": ("tp2", "pp2"), "llama3": ("tp1",)}
VARIANTS = {"recompute": ("tp2_sp", {"recompute": "full"}), "bfloat16": ("tp2_sp", {"dtype": "bfloat16"})}
LIMITS = (10_000, 50)  # tokens of a micro-batch: one for everything, and several


def make_critics(folder: Path) -> dict[str, str]:
    """Writes one-label sequence classifiers with transformers' results of `experience()`, and returns folders by
    name."""
    return {
        name: str(_make(folder / name, family, settings | {"num_hidden_layers": NAMES[name]}))
        for name, (family, settings) in CHECKPOINTS.items()
        if name in NAMES
    }


def _make(path: Path, family: str, settings: dict[str, Any]) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | settings, num_labels=1)
    scorer = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        scorer.score.weight.normal_()
        for parameter in scorer.parameters():
            if parameter.dim() == 1:  # norm weights and biases begin as ones and zeros
                parameter.add_(0.3 * torch.randn_like(parameter))
    scorer.save_pretrained(path)
    samples = experience()
    scores, values, of_texts = [], [], []
    for tokens in samples.tokens.split(samples.lengths.tolist()):
        scores.append(scorer.score(scorer.model(tokens[None]).last_hidden_state)[0, :, 0])
        of_texts.append(scorer(tokens[None]).logits[0])
        values.append(torch.cat([torch.zeros(1), scores[-1][:-1]]))  # the first token has no value
    loss = squared_error(torch.cat(values), samples)
    names, parameters = zip(*scorer.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    expected = {"scores": torch.cat(scores), "of_texts": torch.cat(of_texts), "loss": loss}
    save_file({name: tensor.detach() for name, tensor in expected.items()}, path / "expected.safetensors")
    (path / "gradients").mkdir()
    save_file(gradients, path / "gradients" / "model.safetensors")
    return path


def experience() -> Experience:
    """Returns 10 samples of 1 to 40 tokens. The first third of each is its prompt. Values need no rewards."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 41, (10,), generator=generator)
    lengths[3] = 1
    within = torch.cat([torch.arange(int(n)) for n in lengths])
    tokens = torch.randint(VOCAB_SIZE, (len(within),), generator=generator)
    return plain_experience(lengths.tolist(), tokens, within > lengths.repeat_interleave(lengths) // 3)


def squared_error(values: Tensor, samples: Experience) -> Tensor:
    """Returns the squared distance from targets that differ between positions."""
    targets = (samples.tokens % 7).float() - 3
    return (((values - targets) ** 2) * samples.response_mask).sum() / 2


def all_cases(critics: dict[str, str]) -> dict[str, Any]:
    """Returns this rank's results by "critic/layout"."""
    groups = groups_on(GRIDS.values())
    results: dict[str, Any] = {}
    for name, path in critics.items():
        for layout in COMBINATIONS[name]:
            if dist.get_rank() in GRIDS[layout].ranks:
                results[f"{name}/{layout}"] = _compare(Path(path), layout, groups)
    for variant, (layout, settings) in VARIANTS.items():
        if dist.get_rank() in GRIDS[layout].ranks:
            results[variant] = _compare(Path(critics["qwen3"]), layout, groups, **settings)
    with _Rows() as rows:
        _model(Path(critics["qwen3"]), "pp2", groups)
    results["rows_allocated"] = sorted(rows.seen)
    return results


def _compare(path: Path, layout: str, groups: ProcessGroups, **settings: str) -> dict[str, Any]:
    """Returns the differences of values and losses from transformers, and of gradients relative to their size."""
    grid = GRIDS[layout]
    parts = megatron_layout(read_architecture(path).value_model(), grid)
    model = _model(path, layout, groups, **settings)
    parameters = local_parameters(model)
    load_parameters(path, parts, dist.get_rank(), parameters)
    expected = load_file(path / "expected.safetensors")
    evaluable = EvaluableModel(model)
    scores = torch.stack([evaluable.evaluate(experience(), max_tokens=limit) for limit in LIMITS])
    loss = _backward(model, layout)
    gradients = _expected_gradients(path, parts)
    return {
        "names": {name: tuple(p.shape) for name, p in parameters.items()} == dict(parts.on(dist.get_rank()).parameters),
        "dtypes": sorted({str(parameter.dtype) for parameter in parameters.values()}),
        "head": "output_layer.weight" in parameters,
        "scores": _largest(scores - expected["scores"]),
        "of_texts": _largest(sample_scores(experience(), scores[0]) - expected["of_texts"]),
        "rounded_scores": int((scores == scores.bfloat16()).sum()),
        "loss": loss / float(expected["loss"]) - 1,
        "gradients": {
            name: _largest(parameter.main_grad - gradients[name]) / _largest(gradients[name])
            for name, parameter in parameters.items()
        },
        "empty": evaluable.evaluate(experience().select(torch.tensor([], dtype=torch.int64)), max_tokens=9).tolist(),
    }


def _model(path: Path, layout: str, groups: ProcessGroups, **settings: str) -> LanguageModel:
    own = {"architecture": read_architecture(path).value_model(), "sequence_parallel": layout.endswith("_sp")}
    return blank_model(path, GRIDS[layout], groups, **own, **settings)


def _backward(model: LanguageModel, layout: str) -> float:
    """Computes gradients in main_grad, summed over the micro-batches of all replicas, and returns their loss."""
    groups = model.pg_collection
    (chunk,) = model.chunks
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk, pg_collection=groups
    )
    model.config.finalize_model_grads_func = None
    ddp.zero_grad_buffer()

    def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss = squared_error(before_tokens(of_tokens, batch.experience.lengths), batch.experience)
        return loss, loss.detach().clone()

    batches = model.micro_batches(of_replica(experience(), GRIDS[layout]), min(LIMITS))
    losses = run_schedule(model, batches, outputs, chunks=[ddp], backward=True)
    finalize_model_grads([ddp], None, pg_collection=groups)
    total = torch.stack([torch.zeros(()), *losses]).sum()
    for group in (groups.pp, groups.dp):  # stages before the last have no loss
        dist.all_reduce(total, group=group)
    return float(total)


class _Rows(TorchDispatchMode):
    """Records the numbers of rows of all new matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        made = function(*arguments, **(settings or {}))
        if isinstance(made, Tensor) and made.dim() == 2:
            self.seen.add(made.size(0))
        return made


def _expected_gradients(path: Path, parts: Layout) -> dict[str, Tensor]:
    """Returns this rank's share of transformers' gradients."""
    gradients = {name: torch.zeros(shape) for name, shape in parts.on(dist.get_rank()).parameters}
    load_parameters(path / "gradients", parts, dist.get_rank(), gradients)
    return gradients


def _largest(values: Tensor) -> float:
    return float(values.abs().max())
