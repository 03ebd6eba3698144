"""How many launch scripts import into a config that passes the dry run, and why others do not.

python tools/measure_import.py --from slime [--gpu h100] [--rows N] SCRIPT ...

Each is imported as it is; where keys without a counterpart or a GPU's memory refuse it, once more with
--allow-differences or --gpu.
The named model's config.json is a stand-in (tools/stand_in_models.py): no weights and no data are needed.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from stand_in_models import shape_of, write_stand_in

from rltrain.dry_run.description import describe_job
from rltrain.dry_run.options import DryRunOptions
from rltrain.errors import UserError
from rltrain.importing import model_file
from rltrain.importing.command import imported
from rltrain.importing.sources import FRAMEWORKS
from rltrain.importing.steps import Rows
from rltrain.importing.translation import Translation
from rltrain.importing.writing import written

REASONS = {
    "no launch": "starts nothing that is known",
    "keys without a counterpart": "change what is computed",
    "model family": "config.json: model_type",
    "model family of which transformers builds none": "transformers builds no causal",
    "model family without an engine": "no engine of rltrain serves",
    "memory": "expected at most",
    "model of unknown shape": "the name says no shape",
}
NO_SHAPE = "the name says no shape"
ALLOWING, FITTING = "--allow-differences", "--gpu"
HELPING = {"keys without a counterpart": ALLOWING, "memory": FITTING}


@dataclass(frozen=True)
class Outcome:
    script: str
    reason: str | None
    """Why it does not pass as it is; None: it does."""
    detail: str
    options: tuple[str, ...] | None
    """Those of `rltrain import-config` with which it passes; None: with none of them."""
    last: str = ""
    """Why not, with all that help so far."""

    @property
    def verdict(self) -> str:
        return "does not pass" if self.options is None else " ".join(["passes", *self.options])


def main() -> int:
    arguments = parsed()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for script in arguments.scripts:
            found = tried(script, arguments, Path(folder))
            outcomes.append(found)
            row = (found.verdict, found.reason, found.script, first_lines(found.detail), found.last)
            print("\t".join(map(str, row)), flush=True)
    for what, counted in (
        ("as they are, or why not", Counter(outcome.reason or "passes" for outcome in outcomes)),
        ("with options", Counter(outcome.verdict for outcome in outcomes)),
    ):
        print(f"{what}:")
        for name, number in counted.most_common():
            print(f"{number:4d} of {len(outcomes)}  {name}")
    return 0


def tried(script: str, arguments: argparse.Namespace, folder: Path) -> Outcome:
    """As it is; then with the options that its refusals name."""
    options: list[str] = []
    refusals: list[str] = []
    while True:
        try:
            once(script, arguments, folder, options)
            break
        except UserError as error:
            refusals.append(str(error))
            helping = HELPING.get(reason_of(refusals[-1]))
            if helping is None or helping in options:
                return Outcome(script, reason_of(refusals[0]), refusals[0], None, reason_of(refusals[-1]))
            options.append(helping)
    if not refusals:
        return Outcome(script, None, "", ())
    return Outcome(script, reason_of(refusals[0]), refusals[0], tuple(options))


def once(script: str, arguments: argparse.Namespace, folder: Path, options: Sequence[str]) -> None:
    """UserError where it is refused on its way."""
    rows, source = Rows(rows=arguments.rows), [script, *arguments.arguments]
    allowed = ALLOWING in options
    with patch.object(model_file, "model_config", lambda name: shape_of(str(name)) or {}):
        found = imported(arguments.framework, source, rows=rows, allow_differences=allowed)
        settings = stand_ins(found, folder)
        if FITTING in options:
            found = imported(
                arguments.framework,
                source,
                rows=rows,
                settings=settings,
                allow_differences=allowed,
                gpu=arguments.gpu,
            )
    config = folder / "config.yaml"
    config.write_text(written(found, script), encoding="utf-8")
    run = DryRunOptions(world_size=found.world_size, ranks_per_node=found.ranks_per_node, gpu=arguments.gpu)
    describe_job(config, settings, run)


def stand_ins(found: Translation, folder: Path) -> list[str]:
    """Overrides that put stand-ins in the place of the models. UserError for a name that says no shape."""
    overrides = []
    for key in ("model.path", *(f"{role}.path" for role in ("critic", "reference", "teacher", "reward_model"))):
        if key in found.settings:
            name = str(found.get(key))
            stand_in = write_stand_in(name, folder, classifies=key == "reward_model.path")
            if stand_in is None:
                raise UserError(f"{key}: {name}: {NO_SHAPE}")
            overrides.append(f"{key}={stand_in}")
    return overrides


def reason_of(message: str) -> str:
    return next((reason for reason, part in REASONS.items() if part in message), "refused: " + message.split(":")[0])


def first_lines(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines()[:6])[:600]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="framework", choices=[*FRAMEWORKS], required=True)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the training files (default 100000)")
    parser.add_argument("--gpu", default="h100", help="as of --dry-run")
    parser.add_argument("--arguments", nargs="*", default=[], help="that every script is given")
    parser.add_argument("scripts", nargs="+")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
