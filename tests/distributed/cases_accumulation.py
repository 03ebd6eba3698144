"""The ranks of test_accumulation: optimizer steps of a policy and of a critic, with samples in several parts."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms import losses as value
from rltrain.data.experience import FIELDS, Experience
from rltrain.errors import DivergenceError
from rltrain.models import read_architecture
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import LanguageModel, local_parameters
from tests.distributed.cases_training import (
    GRIDS,
    error_of,
    load_model,
    make_trainable,
    negative_log_likelihood,
    share_of,
    spoiled,
)
from tests.support.trained_models import groups_on, in_training, load_experience
from tests.support.uneven_products import uneven_products

LAYOUTS = (("tp1", "tp2_sp", "pp2_dp2"), ("tp1", "pp2", "dp2"))
"""Quick layouts, slow layouts."""
NUM_SAMPLES = 4
PARTS = {"whole": [4], "three": [1, 1, 2]}
NUM_STEPS = 2
ALONE, FEW = 1, 60
"""Tokens per micro-batch: every sample alone, or a few together."""

Results = Iterator[tuple[str, Any]]


def all_cases(path: str, slow: bool) -> dict[str, Any]:
    """Returns the results in the quick or in the slow layouts, with those of one rank alone."""
    groups = groups_on(GRIDS.values())
    results: dict[str, Any] = {}
    cases = {
        _in_parts: LAYOUTS[slow],
        _missing_shares: ("tp1", "dp2" if slow else "pp2_dp2"),
        _interrupted: () if slow else ("pp2_dp2",),
        _critic: LAYOUTS[slow],
    }
    for case, layouts in cases.items():
        for layout in layouts:
            if dist.get_rank() in GRIDS[layout].ranks:
                results |= dict(case(Path(path), layout, groups))
    return results


def _in_parts(path: Path, layout: str, groups: ProcessGroups) -> Results:
    """Cuts the same mini-batches in different ways. Every replica has a share of every part, sometimes an empty one."""
    for max_tokens, name in product((ALONE, FEW), PARTS):
        experience = load_experience(path).select(torch.arange(NUM_SAMPLES))
        if max_tokens == ALONE and GRIDS[layout].pp > 1:
            # A pipeline pads every part to its longest sample. Equal shapes need samples of equal length.
            experience = _of_one_length(experience)
        trainable = make_trainable(load_model(path, layout, groups), max_tokens)
        steps = []
        with uneven_products():
            for _ in range(NUM_STEPS):
                for part in torch.arange(NUM_SAMPLES).split(PARTS[name]):
                    trainable.accumulate(_share_of_samples(experience, part, layout), negative_log_likelihood)
                steps.append(trainable.step())
        yield f"{layout}/{name}/{max_tokens}", {"steps": steps, "weights": weights_of(trainable)}


def _of_one_length(experience: Experience) -> Experience:
    """Returns the same tokens, except for the last few, in equally long samples."""
    length = experience.num_tokens // experience.num_samples
    columns = {
        name: values[: length * experience.num_samples] if FIELDS[name][1] == "token" else values
        for name, values in experience.columns().items()
    }
    return Experience(**columns | {"lengths": torch.full_like(experience.lengths, length)})


def _share_of_samples(experience: Experience, samples: Tensor, layout: str) -> Experience:
    grid = GRIDS[layout]
    return experience.select(samples[samples % grid.dp == grid.coordinates(dist.get_rank()).dp])


def _missing_shares(path: Path, layout: str, groups: ProcessGroups) -> Results:
    """Trains with samples on the first replica only, without samples, with empty responses, and in a usual step at the
    end."""
    experience = load_experience(path)
    some, none = experience.select(torch.arange(5)), experience.select(torch.arange(0))
    first = GRIDS[layout].coordinates(dist.get_rank()).dp == 0
    trainable = make_trainable(load_model(path, layout, groups), FEW)
    yield f"one_share/{layout}", trainable.train_batch(some if first else none, negative_log_likelihood)
    yield f"no_share/{layout}", error_of(trainable, none, negative_log_likelihood)
    silent = share_of(some.with_fields(response_mask=some.response_mask & False), layout)
    before = weights_of(trainable)
    yield f"no_response/{layout}", trainable.train_batch(silent, negative_log_likelihood)
    yield f"no_response_weights_kept/{layout}", weights_of(trainable) == before
    yield f"usual_step/{layout}", trainable.train_batch(some if first else none, negative_log_likelihood)


def _interrupted(path: Path, layout: str, groups: ProcessGroups) -> Results:
    """Checks two rules: a failed step leaves nothing to the next, and a step needs parts."""
    experience = share_of(load_experience(path).select(torch.arange(NUM_SAMPLES)), layout)
    fresh, failed = (make_trainable(load_model(path, layout, groups), FEW) for _ in range(2))
    failed.accumulate(experience, negative_log_likelihood)
    failed.accumulate(experience, spoiled)
    try:
        failed.step()
    except DivergenceError as error:
        yield f"diverged/{layout}", str(error)
    try:
        failed.step()
    except RuntimeError as error:
        yield f"no_parts/{layout}", str(error)
    steps = [trainable.train_batch(experience, negative_log_likelihood) for trainable in (fresh, failed)]
    yield f"after_failure/{layout}", {"same": steps[0] == steps[1] and weights_of(fresh) == weights_of(failed)}


def _critic(path: Path, layout: str, groups: ProcessGroups) -> Results:
    """Updates a critic twice in two parts each, and computes the expected results by autograd on the whole model."""
    model = _value_model(path, layout, groups)
    whole = load_experience(path).select(torch.arange(NUM_SAMPLES))
    generator = torch.Generator().manual_seed(7)
    whole = whole.with_fields(
        returns=torch.rand(whole.num_tokens, generator=generator), values=torch.zeros(whole.num_tokens)
    )
    report: dict[str, Any] = {"response_tokens": int(whole.response_mask.sum())}
    if layout == "tp1":
        report["expected"] = _plain_critic(model, whole)
    trainable = in_training(model, updates=NUM_STEPS, max_tokens=FEW, optimizer={"lr": 1e-4}, role="critic")
    loss_function = value.of_states(value.value_loss(0.2))
    report["steps"] = []
    for _ in range(NUM_STEPS):
        for part in torch.arange(NUM_SAMPLES).split([1, 3]):
            trainable.accumulate(_share_of_samples(whole, part, layout), loss_function)
        report["steps"].append(value.summarize(trainable.step()))
    trainable.accumulate(share_of(whole, layout), loss_function)
    trainable.accumulate(share_of(whole.with_fields(returns=whole.returns * float("nan")), layout), loss_function)
    try:
        trainable.step()
    except DivergenceError as error:
        report["diverged"] = str(error)
    report["values"] = float(trainable.evaluate(whole, max_tokens=FEW).abs().max())
    yield f"critic/{layout}", report


def _value_model(path: Path, layout: str, groups: ProcessGroups) -> LanguageModel:
    """Returns the checkpoint's model with a value head other than zero."""
    architecture = read_architecture(path).value_model()
    model = load_model(path, layout, groups, architecture=architecture)
    if "output_layer.weight" in (parameters := local_parameters(model)):
        head = parameters["output_layer.weight"].data
        head.copy_(0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
    return model


def _plain_critic(model: LanguageModel, experience: Experience) -> dict[str, float]:
    """Returns loss and gradient norm of the first update, sample by sample, without schedules or data parallelism."""
    assert experience.returns is not None
    losses = []
    for tokens, mask, returns in zip(
        *(column.split(experience.lengths.tolist()) for column in (experience.tokens, experience.response_mask)),
        experience.returns.split(experience.lengths.tolist()),
        strict=True,
    ):
        outputs = model.chunks[0](tokens[None], None, None, packed_seq_params=model.sequences([len(tokens)]))[0]
        values = torch.cat([outputs.new_zeros(1), outputs[:-1]])
        near = values.clamp(-0.2, 0.2)
        losses.append((torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2)[mask])
    loss = torch.cat(losses).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.item(), "grad_norm": torch.cat([g.flatten() for g in gradients]).norm().item()}


def weights_of(trainable: TrainableModel) -> list[float]:
    """Returns numbers that change with any weight: sums of each parameter, and of its squares."""
    parameters = [parameter.detach().double() for parameter in trainable.model.parameters()]
    return [float(value) for p in parameters for value in (p.sum(), p.square().sum())]
