"""How many launch scripts import into a config that passes the dry run, and why others do not.

python tools/measure_import.py --from slime [--allow-differences] [--rows N] SCRIPT ...

The named model's config.json is a stand-in (tools/stand_in_models.py): no weights and no data are needed.
"""

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stand_in_models import shape_of, write_stand_in

from rltrain.dry_run.description import describe_job
from rltrain.dry_run.options import DryRunOptions
from rltrain.errors import UserError
from rltrain.importing import model_file
from rltrain.importing.command import imported
from rltrain.importing.sources import FRAMEWORKS
from rltrain.importing.steps import Rows
from rltrain.importing.writing import written

REASONS = {
    "no launch": "starts nothing that is known",
    "keys without a counterpart": "change what is computed",
    "model family": "config.json: model_type",
    "model family of which transformers builds none": "transformers builds no causal",
    "model family without an engine": "no engine of rltrain serves",
    "memory": "expected at most",
}
NO_SHAPE = "model whose name says no shape"


@dataclass(frozen=True)
class Outcome:
    script: str
    reason: str | None
    detail: str


def main() -> int:
    arguments = parsed()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for script in arguments.scripts:
            try:
                outcomes.append(tried(script, arguments, Path(folder)))
            except UserError as error:
                outcomes.append(Outcome(script, reason_of(str(error)), str(error)))
    for outcome in outcomes:
        print(f"{outcome.reason or 'passes'}\t{outcome.script}\t{first_lines(outcome.detail)}")
    reasons = Counter(outcome.reason or "passes" for outcome in outcomes)
    for reason, number in reasons.most_common():
        print(f"{number:4d} of {len(outcomes)}  {reason}")
    return 0


def tried(script: str, arguments: argparse.Namespace, folder: Path) -> Outcome:
    """UserError where it is refused on its way."""
    rows = Rows(rows=arguments.rows)
    source = [script, *arguments.arguments]
    with patch.object(model_file, "model_config", lambda name: shape_of(str(name)) or {}):
        found = imported(arguments.framework, source, rows=rows, allow_differences=arguments.allow_differences)
    settings: dict[str, Any] = {"model.path": found.get("model.path")}
    for role in ("critic", "reference"):
        if f"{role}.path" in found.settings:
            settings[f"{role}.path"] = found.get(f"{role}.path")
    overrides = []
    for key, name in settings.items():
        stand_in = write_stand_in(str(name), folder)
        if stand_in is None:
            return Outcome(script, NO_SHAPE, str(name))
        overrides.append(f"{key}={stand_in}")
    config = folder / "config.yaml"
    config.write_text(written(found, script), encoding="utf-8")
    options = DryRunOptions(world_size=found.world_size, ranks_per_node=found.ranks_per_node, gpu=arguments.gpu)
    describe_job(config, overrides, options)
    return Outcome(script, None, "")


def reason_of(message: str) -> str:
    return next((reason for reason, part in REASONS.items() if part in message), "refused: " + message.split(":")[0])


def first_lines(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines()[:6])[:600]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="framework", choices=[*FRAMEWORKS], required=True)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the training files (default 100000)")
    parser.add_argument("--gpu", default="h100", help="as of --dry-run")
    parser.add_argument("--allow-differences", action="store_true")
    parser.add_argument("--arguments", nargs="*", default=[], help="that every script is given")
    parser.add_argument("scripts", nargs="+")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
