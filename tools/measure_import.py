"""Counts the launch scripts that import into a config and pass the dry run, and the reasons of the others.

python tools/measure_import.py --from slime [--gpu h100] [--rows N] SCRIPT ...

Scripts without a training, on audio or video, or with a trainer out of scope, are listed and not counted (OUTSIDE).
That depends on a script's own keys and programs, never on its import. Each other script is imported unchanged. If keys
without a counterpart prevent that, it is imported again with --allow-differences, and with --allow-holes. The named
model's config.json is a stand-in (stand_in_models.py), so no weights and no data are needed.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stand_in_models import shape_of, write_stand_in

from rltrain.errors import UserError
from rltrain.import_config import translation
from rltrain.import_config.command import KEEP, imported, written
from rltrain.import_config.sources import FRAMEWORKS, Framework, read
from rltrain.import_config.translation import RowCounts, Translation
from rltrain.planning.description import describe_job
from rltrain.planning.options import DryRunOptions

NO_SHAPE = "no known shape for this name"
REASONS = {
    "no launch": "starts no command of",
    "keys without a counterpart": "change results",
    "model family": "config.json: model_type",
    "model family of which transformers builds none": "transformers builds no causal",
    "model family whose model in transformers is refused": ": the family ",
    "model family without an engine": "no engine of rltrain serves",
    "memory": "expected at most",
    "experts over more ranks than there are": "divides experts among",
    "fewer prompts than replicas": "data-parallel replicas, but",
    "model of unknown shape": NO_SHAPE,
}
TRAINS = re.compile(r"^\s+(trainer\.\w+|data\.train_\w+|--rollout-batch-size)", re.MULTILINE)
"""Keys of a training, in a script without a readable launch."""
HEARS = re.compile(r"minicpm-?o|omni|[-_]audio|[-_]video", re.IGNORECASE)
BACKENDS = re.compile(r"veomni|torchtitan|automodel|megatron_lite|mlite|mindspeed|fsdp_turbo")
"""verl's trainers other than FSDP and Megatron."""
FOR_NPUS = re.compile(r"^export \w*ASCEND", re.MULTILINE)
"""A setting for NPUs. It counts even if a variable selects another device."""
OWN_GENERATOR = re.compile(r"def get_generator\b")
"""SkyRL's method that makes the generator, in a program with its own generator."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    script: str
    reason: str | None
    """The reason if the unchanged script does not pass, else None."""
    detail: str = ""
    reason_allowing: str | None = None
    """The reason if it does not pass with --allow-differences either, else None."""
    reason_with_holes: str | None = None
    """The reason if it does not pass with --allow-holes alone, else None."""
    own_generator: bool = False


def _of_sounds_or_films(keys: Keys) -> bool:
    names = [str(value) for key, value in keys.items() if key.endswith(("model.path", "model_path", "hf-checkpoint"))]
    return any(map(HEARS.search, names)) or bool(keys.get("data.video_key"))


def _of_other_backends(keys: Keys) -> bool:
    named = re.compile(r"(.*\.)?(engine|model_engine|strategy)|actor@.*|--config-name")
    return any(BACKENDS.search(str(value)) for key, value in keys.items() if named.fullmatch(key))


def _draws_only(keys: Keys) -> bool:
    return re.search("generate|generation", str(keys.get("-m", "")).rsplit(".", 1)[-1]) is not None


def _on_made_up_data(keys: Keys) -> bool:
    named = (value for key, value in keys.items() if re.search(r"dummy|simulate", key))
    return any(str(value).lower() not in ("false", "0", "none", "null", "") for value in named)


NPUS = "on NPUs"
OUTSIDE: dict[str, Callable[[Keys], bool]] = {
    "on audio or video": _of_sounds_or_films,
    NPUS: lambda keys: str(keys.get("trainer.device", "")).strip("'\"") == "npu",
    "by a trainer other than FSDP and Megatron": _of_other_backends,
    "generates, and trains nothing": _draws_only,
    "on made-up data or steps": _on_made_up_data,
}
NO_TRAINING = "starts no training"


def outside(framework: Framework, script: str, arguments: list[str]) -> str | None:
    """Returns the reason if a script is not counted, else None."""
    try:
        keys = read(framework, [script, *arguments], os.environ).keys
    except UserError:
        return None if TRAINS.search(_code(script)) else NO_TRAINING
    if FOR_NPUS.search(_code(script)):
        return NPUS
    return next((reason for reason, holds in OUTSIDE.items() if holds(keys)), None)


def generates_by_its_own(framework: Framework, script: str, arguments: list[str]) -> bool:
    """Returns whether the started program replaces the framework's generator, as an agent's harness does."""
    try:
        found = read(framework, [script, *arguments], os.environ)
    except UserError:
        return False
    started = str(found.keys.get("-m", ""))
    if started.startswith("skyrl."):
        return False
    module = started.replace(".", "/") + ".py"
    program = next((folder / module for folder in found.folder.resolve().parents if (folder / module).is_file()), None)
    return program is not None and OWN_GENERATOR.search(program.read_text(encoding="utf-8")) is not None


def _code(script: str) -> str:
    """Returns the script without comment lines."""
    lines = Path(script).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def main() -> int:
    arguments = parsed()
    framework = FRAMEWORKS[arguments.framework]
    outcomes = []
    left_out: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for script in arguments.scripts:
            reason = outside(framework, script, arguments.arguments)
            if reason is not None:
                left_out[reason] += 1
                print("not counted", reason, script, sep="\t", flush=True)
                continue
            outcomes.append(tried(script, arguments, Path(folder)))
            print(*row_of(outcomes[-1]), sep="\t", flush=True)
    print_counted("not counted", left_out)
    print_counted("unchanged scripts", Counter(one.reason or "pass" for one in outcomes))
    print_counted("with --allow-differences", Counter(one.reason_allowing or "pass" for one in outcomes))
    trained = [one for one in outcomes if "model family" not in (one.reason_allowing or "")]
    print_counted("with --allow-holes", Counter(one.reason_with_holes or "pass" for one in outcomes))
    print_counted("of a supported model family", Counter(one.reason or "pass" for one in trained))
    usual = [one for one in trained if not one.own_generator]
    print_counted("of these, with the framework's own generator", Counter(one.reason or "pass" for one in usual))
    return 0


def row_of(outcome: Outcome) -> tuple[str, ...]:
    verdict = "passes" if outcome.reason is None else "does not pass"
    allowing = "" if outcome.reason is None else outcome.reason_allowing or "passes with --allow-differences"
    return verdict, outcome.reason or "", outcome.script, first_lines(outcome.detail), allowing


def print_counted(title: str, counted: Counter[str]) -> None:
    print(f"{title}:")
    for name, number in counted.most_common():
        print(f"{number:4d} of {counted.total()}  {name}")


def tried(script: str, arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Imports the script unchanged, and then with each option if it did not pass."""
    plain = refusal(script, arguments, folder)
    allowing = plain and refusal(script, arguments, folder, differences=True)
    opening = plain and refusal(script, arguments, folder, holes=True)
    own = generates_by_its_own(FRAMEWORKS[arguments.framework], script, arguments.arguments)
    reasons = [reason_of(one) if one else None for one in (plain, allowing, opening)]
    return Outcome(script, reasons[0], plain, reasons[1], reasons[2], own)


def refusal(
    script: str, arguments: argparse.Namespace, folder: Path, *, differences: bool = False, holes: bool = False
) -> str:
    """Returns why the script does not pass with these options. Empty if it passes."""
    try:
        once(script, arguments, folder, differences=differences, holes=holes)
    except UserError as error:
        return str(error)
    return ""


def once(
    script: str, arguments: argparse.Namespace, folder: Path, *, differences: bool = False, holes: bool = False
) -> None:
    """Imports the script and describes the job. Raises UserError if a step refuses it."""
    rows, source = RowCounts(rows=arguments.rows), [script, *arguments.arguments]
    of_folder = translation.model_config
    with patch.object(translation, "model_config", lambda name: of_folder(name) or shape_of(str(name)) or {}):
        of_source = partial(
            imported, arguments.framework, source, rows=rows, allow_differences=differences, allow_holes=holes
        )
        found = of_source(gpu=KEEP)
        settings = [*stand_ins(found, folder), *fillings(found, folder)]
        found = of_source(settings=settings, gpu=arguments.gpu)
    config = folder / "config.yaml"
    config.write_text(written(found, script), encoding="utf-8")
    run = DryRunOptions(world_size=found.world_size, ranks_per_node=found.ranks_per_node, gpu=arguments.gpu)
    describe_job(config, settings, run)


def stand_ins(found: Translation, folder: Path) -> list[str]:
    """Returns overrides that replace the models by stand-ins. Raises UserError for a name of unknown shape."""
    overrides = []
    for key in ("model.path", *(f"{role}.path" for role in ("critic", "reference", "teacher", "reward_model"))):
        if key in found.settings:
            name = str(found.get(key))
            stand_in = write_stand_in(name, folder, classifies=key == "reward_model.path")
            if stand_in is None:
                raise UserError(f"{key}: {name}: {NO_SHAPE}")
            overrides.append(f"{key}={stand_in}")
    return overrides


ENVIRONMENT = "class Mine:\n    def reset(self, row, seed): ...\n    def step(self, action): ...\n"
"""An environment in place of the source's own."""


def fillings(found: Translation, folder: Path) -> list[str]:
    """Returns overrides for the parts that --allow-holes leaves open."""
    (folder / "mine.py").write_text(ENVIRONMENT)
    filled = {"env.function": f"{folder}/mine.py:Mine", "reward.function": "math", "data.train.path": "/rows.jsonl"}
    return [f"{path}={filled[path]}" for path in found.holes]


def reason_of(message: str) -> str:
    return next((reason for reason, part in REASONS.items() if part in message), "refused: " + message.split(":")[0])


def first_lines(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines()[:6])[:600]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="framework", choices=[*FRAMEWORKS], required=True)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the training files (default 100000)")
    parser.add_argument("--gpu", default="h100", help="the GPU that configs must fit (default h100)")
    parser.add_argument("--arguments", nargs="*", default=[], help="arguments for every script")
    parser.add_argument("scripts", nargs="+")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
