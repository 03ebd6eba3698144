"""Compares the definitions and results of two commits, for changes that only move code.

    python tools/compare_commits.py OLD [NEW] [--definitions] [--out FILE]

NEW is HEAD by default. Four things are compared:

- definitions: functions, methods, classes and constants of rltrain, launch and tools, by qualified name without the
  module. Docstrings, comments, imports and the names of imported modules are ignored.
- dry runs: the output of `rltrain dry-run` for every file in configs, and the digests of the orders in it.
- schema: configs/schema.json.
- training: metrics and final weights of 20 steps of the quickstart from tests/warmed_up, seed 5, on four ranks.

--definitions compares only the first, in seconds. The rest takes about two minutes. The exit status is 0 if nothing
differs, else 1. Metrics of time and memory are ignored.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("rltrain", "launch", "tools")
MEASURED = re.compile(
    r"time|second|_s$|_s/|/s$|per_s|memory|_bytes|_mb|_gb|tokens_per|throughput|utili[sz]ation|idle|flops"
)
"""Metrics that differ between two runs of the same commit."""
PATH_IN_TEXT = re.compile(r"\brltrain(\.\w+)+|\b(rltrain|tools|tests)(/\w+)+\.py\b")
WORLD_SIZE = re.compile(r"^# world size: (\d+)", re.MULTILINE)
STEPS, SEED, RANKS = 20, 5, 4
KERNELS = "rltrain/reshard"
"""Folder of the native libraries. Older commits have them in the folder "kernels" below it."""
DIGESTS = """
import contextlib, importlib, io, json, sys
module, name, command, config, world_size = sys.argv[1:]
kind, made = getattr(importlib.import_module(module), name), []
begin = kind.__init__
kind.__init__ = lambda self, *args, **kwargs: (begin(self, *args, **kwargs), made.append(self))[0]
main = importlib.import_module(command).main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["dry-run", "--config", config, "--world-size", world_size])
print(json.dumps([order.digest() for order in made]))
"""
"""A program that prints the digests of the orders of a dry run. Its arguments name the module with class Order, the
class, and the module of the command."""


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--definitions", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        trees = [
            check_out(commit, Path(folder, name)) for name, commit in (("old", arguments.old), ("new", arguments.new))
        ]
        differences = compare_definitions(*map(definitions, trees))
        if not arguments.definitions:
            differences += compare_texts("dry run", *map(dry_runs, trees))
            schemas = [{"configs/schema.json": (tree / "configs/schema.json").read_text()} for tree in trees]
            differences += compare_texts("schema", *schemas)
            differences += compare_texts("training", *(training(tree, Path(folder)) for tree in trees))
    told = "\n".join([*differences, f"{len(differences)} differences"])
    print(told)
    if arguments.out:
        arguments.out.write_text(told + "\n")
    return int(bool(differences))


def check_out(commit: str, folder: Path) -> Path:
    """Writes the files of a commit to `folder`, with the native libraries of this checkout. Returns `folder`."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    home = folder / KERNELS / "kernels" if (folder / KERNELS / "kernels").is_dir() else folder / KERNELS
    for library in (REPOSITORY / KERNELS).glob("*.so"):
        shutil.copy(library, home)
    return folder


def definitions(tree: Path) -> Counter[tuple[str, str]]:
    """Returns the number of definitions by (qualified name, digest of the syntax tree)."""
    return Counter(
        (name, hashlib.sha256(dumped.encode()).hexdigest()[:12])
        for folder in FOLDERS
        for path in sorted((tree / folder).rglob("*.py"))
        for name, dumped in definitions_of(path, tree)
    )


def definitions_of(path: Path, tree: Path) -> Iterator[tuple[str, str]]:
    parsed = ast.parse(path.read_text())
    parsed = ast.fix_missing_locations(Plain(imported_names(parsed, tree)).visit(parsed))
    yield from _of_body(parsed.body, "")


def _of_body(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _of_body(node.body, f"{prefix}{node.name}.")
            header = [*node.bases, *node.keywords, *node.decorator_list]
            yield prefix + node.name, " ".join(map(ast.dump, header))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, ast.dump(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield prefix + ", ".join(map(ast.unparse, targets)), ast.dump(node)
        elif not isinstance(node, ast.Pass):
            yield f"{prefix}<{type(node).__name__}>", ast.dump(node)


def imported_names(parsed: ast.Module, tree: Path) -> dict[str, str | None]:
    """Returns the original name of each imported name, or None for a module of rltrain."""
    found: dict[str, str | None] = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("rltrain", "tools", "benchmarks"):
            folder = tree.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name / "__init__.py").exists()
                found[alias.asname or alias.name] = None if is_module else alias.name
    return found


class Plain(ast.NodeTransformer):
    """Removes docstrings and imports, and gives imported names their form in their own module."""

    def __init__(self, imported: dict[str, str | None]) -> None:
        self.imported = imported

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802
        if isinstance(node.value, ast.Name) and self.imported.get(node.value.id, "") is None:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: N802
        return ast.Name(self.imported.get(node.id) or node.id, node.ctx)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:  # noqa: N802
        if isinstance(node.value, str):
            return ast.Constant(PATH_IN_TEXT.sub("rltrain", node.value))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:  # noqa: N802
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:  # noqa: N802
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:  # noqa: N802
        return None


def compare_definitions(old: Counter[tuple[str, str]], new: Counter[tuple[str, str]]) -> list[str]:
    """Returns a line for each name with different definitions."""
    gone, come = (
        Counter(name for name, _ in (old - new).elements()),
        Counter(name for name, _ in (new - old).elements()),
    )
    told = []
    for name in sorted(gone | come):
        changed = min(gone[name], come[name])
        for count, what in ((changed, "changed"), (gone[name] - changed, "removed"), (come[name] - changed, "added")):
            if count:
                told.append(f"definition {what}: {name}" + (f" ({count} times)" if count > 1 else ""))
    return told


def compare_texts(what: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Returns a line for each key with different texts."""
    return [f"{what} differs: {key}" for key in sorted(old | new) if old.get(key) != new.get(key)]


def dry_runs(tree: Path) -> dict[str, str]:
    """Returns the dry run's output and the digests of its orders, for each config."""
    homes = {path: path.read_text() for path in (tree / "rltrain").rglob("*.py")}
    (home,) = (path for path, text in homes.items() if "class Order" in text and "def digest(" in text)
    module = ".".join(home.relative_to(tree).with_suffix("").parts)
    (entry,) = re.findall(r"from (rltrain\.[\w.]+) import main", (tree / "rltrain/__main__.py").read_text())
    found = {}
    for config in sorted((tree / "configs").glob("*.yaml")):
        told = WORLD_SIZE.search(config.read_text())
        size = told[1] if told else "1"
        name = f"configs/{config.name}"
        command = ["-m", "rltrain", "dry-run", "--config", name, "--world-size", size]
        found[f"{name}, output"] = PATH_IN_TEXT.sub("rltrain", run(tree, *command).replace(str(tree), ""))
        found[f"{name}, digests"] = run(tree, "-c", DIGESTS, module, "Order", entry, name, size)
    return found


def training(tree: Path, folder: Path) -> dict[str, str]:
    """Returns the metrics of every step and a digest of the final weights."""
    start, out = folder / "start", tree / "run"
    if not start.exists():
        told = run(tree, "tools/make_quickstart.py", "--output", str(start), "--seed", str(SEED))
        if not start.exists():
            raise SystemExit(f"tools/make_quickstart.py made nothing: {told[-2000:]}")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "launch/train.py")
    rows = (f"data.train.path={start / 'train.jsonl'}", f"data.eval.path={start / 'eval.jsonl'}")
    settings = (f"model.path={tree / 'tests/warmed_up'}", f"output_dir={out}", f"steps={STEPS}", f"seed={SEED}", *rows)
    told = run(tree, *torchrun, "--config", "configs/quickstart.yaml", *settings)
    weights = sorted((out / "hf").glob("*.safetensors"))
    if not weights:
        raise SystemExit(f"{tree.name}: the training saved no weights: {told[-2000:]}")
    found = {f"{path.name} after step {STEPS}": hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
    for number, record in enumerate(map(json.loads, (out / "metrics.jsonl").read_text().splitlines())):
        found |= {f"{name}, record {number}": repr(value) for name, value in computed(record).items()}
    return found


def computed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not MEASURED.search(name)}


def run(tree: Path, *arguments: str) -> str:
    """Runs Python and returns its output, with the error output and exit status if it failed."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}\nstatus {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
