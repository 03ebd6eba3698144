"""Writes the tables of the pages on coming from other trainers, from the import rules.

python -m rltrain.import_config.pages    # rewrites the tables in docs/coming_from/*.md
"""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from rltrain import import_config
from rltrain.config.foreign import PAIRS, Pair

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "coming_from"
PAGES = ("slime", "verl", "skyrl", "rlinf")


def page(framework: str) -> str:
    """Returns the text of a page in PAGES, with new tables between its markers."""
    text = (FOLDER / f"{framework}.md").read_text(encoding="utf-8")
    for name, table in (("one_to_one", one_to_one(framework)), ("left_over", left_over(framework))):
        before, _, rest = text.partition(f"<!-- {name} -->")
        _, _, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}<!-- {name} -->\n\n{table}\n\n<!-- /{name} -->{after}"
    return text


def one_to_one(framework: str) -> str:
    """Returns the table of keys with exactly one counterpart, with their defaults in the other framework."""
    pairs = {pair.key: pair for pair in PAIRS[framework]}
    return "\n".join(["| key | here | default there |", "| --- | --- | --- |", *map(_row, pairs.values())])


def left_over(framework: str) -> str:
    """Returns the table of ignored keys by reason. They do not change any result."""
    by_reason: dict[str, list[str]] = {}
    for module in modules_of(framework):
        for name in (name for name in vars(module) if name.endswith("HARMLESS")):
            for pattern, reasons in getattr(module, name).items():
                for reason in reasons:
                    by_reason.setdefault(reason, []).append(f"`{pattern}`")
    rows = (f"| {reason} | {', '.join(dict.fromkeys(patterns))} |" for reason, patterns in by_reason.items())
    return "\n".join(["| reason | keys |", "| --- | --- |", *rows])


def modules_of(framework: str) -> Iterator[ModuleType]:
    """Yields the rule modules of a framework."""
    for module in pkgutil.iter_modules(import_config.__path__):
        if module.name == framework or module.name.startswith(f"{framework}_"):
            yield importlib.import_module(f"{import_config.__name__}.{module.name}")


def _row(pair: Pair) -> str:
    shown = str(pair.default).lower() if pair.default in (True, False) else pair.default
    return f"| `{pair.key}` | `{pair.here}` | {'' if pair.default is None else f'`{shown}`'} |"


if __name__ == "__main__":
    for framework in PAGES:
        (FOLDER / f"{framework}.md").write_text(page(framework), encoding="utf-8")
