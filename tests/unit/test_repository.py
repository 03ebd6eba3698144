"""Rules for the repository as a whole: imports, sizes, style, types, requirements."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("rltrain", "launch", "tools") for path in (REPOSITORY / folder).rglob("*.py"))
SCRIPTS = [
    *sorted((REPOSITORY / "launch").rglob("*.s[hb]*")),
    *(REPOSITORY / name for name in ("tests/run.sh", "tests/processors.sh", "tests/versions.sh", ".ci/run")),
]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONSTRAINTS = REPOSITORY / "launch" / "constraints-cpu.txt"
SGLANG_CONSTRAINTS = REPOSITORY / "launch" / "constraints-sglang.txt"

RUN_BY_SGLANG = REPOSITORY / "rltrain" / "rollout" / "servers" / "in_sglang"
"""Files for another Python without rltrain. They are modules on its path, not in a package."""

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60

# Each room of rltrain with its allowed imports from other rooms. A dotted name allows only this module.
BASE = ("config", "errors", "tasks")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "tasks": (),
    "config": ("errors", "tasks"),
    "sandbox": ("errors",),
    "runtime": BASE,
    "models": (*BASE, "runtime.grid", "runtime.json_text"),
    "observability": (*BASE, "runtime"),
    "rewards": (*BASE, "runtime", "sandbox"),
    "environments": (*BASE, "rewards", "runtime", "sandbox"),
    "reshard": (*BASE, "models", "runtime"),
    "checkpoint": (*BASE, "models", "reshard", "runtime"),
    "data": (*BASE, "environments.interface", "models.rope_positions", "models.vision", "runtime"),
    "algorithms": (*BASE, "data", "rewards.locating"),
    "exchange": (*BASE, "data", "runtime"),
    "schedule": (*BASE, "algorithms", "runtime.placement"),
    "offload": (*BASE, "runtime", "schedule"),
    "training": (*BASE, "algorithms", "checkpoint", "data", "models", "offload", "reshard", "runtime"),
    "rollout": (*BASE, "checkpoint", "data", "environments", "models", "offload", "reshard", "runtime"),
    "endpoint": (
        *BASE,
        *("checkpoint", "data", "environments.interface", "models", "reshard", "rewards.answers", "rollout", "runtime"),
    ),
    "planning": (
        *BASE,
        *("algorithms", "data", "models", "observability", "reshard", "rewards", "runtime", "schedule"),
        *("rollout.layout", "rollout.workspace"),
    ),
    "import_config": (*BASE, "data.rows", "models.of_roles", "models.registry", "planning", "runtime"),
    "roles": (
        *BASE,
        *("algorithms", "checkpoint", "data", "endpoint", "environments", "exchange", "models", "observability"),
        *("offload", "reshard", "rewards", "rollout", "runtime", "schedule"),
        *("training.backend", "training.shards", "training.trainable"),
    ),
    "trainer": (
        *BASE,
        *("algorithms", "checkpoint", "data.hub", "exchange", "models", "observability", "offload", "planning"),
        *("reshard.native", "roles", "rollout.in_flight_sync", "runtime", "schedule"),
    ),
    "cli": (
        *BASE,
        *("algorithms.registry", "checkpoint", "data", "endpoint", "models", "observability", "planning", "reshard"),
        *("rollout", "runtime", "trainer", "training"),
    ),
    "__main__": ("cli",),
}

# --dry-run and planning on every rank use these. They start quickly because they do not load torch.
FAST_TO_IMPORT = (
    *("config.schema", "config.loader", "algorithms.registry", "schedule.shape", "schedule.step"),
    *("planning.validation", "planning.validation_schedule", "planning.sync_time", "planning.description"),
    *("runtime.grid", "runtime.placement", "runtime.image_files", "data.images"),
    *("models", "models.flops", "models.vision", "models.rope_positions"),
    *("reshard.layout", "reshard.plan", "reshard.megatron_layout"),
    *("rollout.layout", "rollout.workspace", "sandbox.means", "cli.python_interface"),
)
PICKLING_COLLECTIVES = {"all_gather_object", "gather_object"}
PICKLING_COLLECTIVES |= {f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imported_modules(path: Path) -> Iterator[str]:
    """Yields the imported modules of rltrain, without the leading "rltrain."."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [
                submodule if _is_module(submodule := f"{node.module}.{alias.name}") else node.module
                for alias in node.names
            ]
        else:
            continue
        yield from (name.removeprefix("rltrain.") for name in names if name.startswith("rltrain."))


def _is_module(name: str) -> bool:
    path = REPOSITORY / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def top_level_imports(path: Path) -> set[str]:
    """Returns the names of all imported modules, up to the first dot."""
    nodes = [node for node in nodes_of(path) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [[a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] for node in nodes]
    return {name.split(".")[0] for found in names for name in found}


def is_within(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def test_imports_run_downward() -> None:
    violations, parts = [], set()
    for path in (REPOSITORY / "rltrain").rglob("*.py"):
        part = path.relative_to(REPOSITORY / "rltrain").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        parts.add(part)
        allowed = (part, *MAY_IMPORT.get(part, ()))
        violations += [
            f"{relative(path)} imports rltrain.{module}"
            for module in imported_modules(path)
            if not any(is_within(module, other) for other in allowed)
        ]
    assert not violations, "\n".join(violations)
    assert parts <= MAY_IMPORT.keys(), f"add to MAY_IMPORT the allowed imports of {sorted(parts - MAY_IMPORT.keys())}"


def assert_no_cycle(remaining: dict[str, set[str]]) -> None:
    while remaining:
        lowest = [part for part, others in remaining.items() if not others & remaining.keys()]
        assert lowest, f"these may import each other: {sorted(remaining)}"
        for part in lowest:
            del remaining[part]


def test_the_import_rule_has_no_cycle() -> None:
    assert_no_cycle({part: {other.split(".")[0] for other in allowed} for part, allowed in MAY_IMPORT.items()})


def test_no_modules_import_each_other() -> None:
    """Only imports of modules count. An import inside a function may close a circle."""
    remaining = {}
    for path in (REPOSITORY / "rltrain").rglob("*.py"):
        statements = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        found = {(node.module or "", alias.name) for node in statements for alias in node.names}
        modules = {f"{module}.{name}" if _is_module(f"{module}.{name}") else module for module, name in found}
        own = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        remaining[own] = {module for module in modules if module.startswith("rltrain.")} - {own}
    assert_no_cycle(remaining)


def test_only_their_list_knows_the_training_backends() -> None:
    training = REPOSITORY / "rltrain" / "training"
    of_fsdp = {*training.glob("fsdp_*.py")}
    backends = {"training.megatron", *(f"training.{path.stem}" for path in of_fsdp)}
    assert len(backends) > 1
    for path in {*training.glob("*.py")} - of_fsdp - {training / "backend.py"}:
        known = [module for module in imported_modules(path) if any(is_within(module, part) for part in backends)]
        assert not known and "megatron" not in top_level_imports(path), relative(path)
    at_its_import = [
        node for node in ast.parse((training / "backend.py").read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    assert not any(re.search("megatron|fsdp", ast.unparse(node)) for node in at_its_import)


def test_tests_load_megatron_as_rltrain_does() -> None:
    """rltrain leaves out torch's compiler, because it takes seconds to load and warns."""
    for path in (REPOSITORY / "tests").rglob("*.py"):
        direct = re.search(r"^(from|import) megatron", text := path.read_text(), re.MULTILINE)
        before = text[: direct.start()] if direct else ""
        assert not direct or re.search(r"^(from|import) rltrain\.training\.megatron", before, re.MULTILINE), relative(
            path
        )


def test_launch_imports_only_commands() -> None:
    for path in (REPOSITORY / "launch").rglob("*.py"):
        assert set(imported_modules(path)) <= {"cli.main"}, relative(path)


def test_what_sglangs_python_runs_imports_nothing_that_it_lacks() -> None:
    files = sorted(RUN_BY_SGLANG.rglob("*.py"))
    modules = {path.stem for path in files}
    assert modules and all(name.startswith("rltrain_") for name in modules), (
        "names need the prefix rltrain_ to be unique there"
    )
    for path in files:
        foreign = top_level_imports(path) - {"torch", "sglang", *modules, *sys.stdlib_module_names}
        assert not foreign, f"{relative(path)} imports {sorted(foreign)}"


def test_pure_modules_do_not_load_torch() -> None:
    imports = "\n".join(f"import rltrain.{module}" for module in FAST_TO_IMPORT)
    heavy = "{'torch', 'transformers', 'megatron'}"
    program = f"import sys\n{imports}\nsys.exit(', '.join({heavy} & sys.modules.keys()) or None)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"importing {FAST_TO_IMPORT} loads or raises: {done.stderr}"


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in SOURCES:
        num_lines = len(path.read_text().splitlines())
        too_long += [f"{relative(path)}: {num_lines} lines"] if num_lines > MAX_FILE_LINES else []
        functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
        too_long += [f"{relative(path)}: {name}, {n} lines" for name, n in lengths if n > MAX_FUNCTION_LINES]
    assert not too_long, "\n".join(too_long)


def test_allowed_values_are_listed_in_one_way() -> None:
    """`errors.one_of` and `errors.listed` never cut a list without a count, and name the nearest value."""
    own = re.compile(r"one of \{\W*', '\.join|join\(.*\[:\d+\]\)")
    for path in set((REPOSITORY / "rltrain").rglob("*.py")) - {REPOSITORY / "rltrain" / "errors.py"}:
        assert not (found := own.search(path.read_text())), f"{relative(path)}: {found[0]}"


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [relative(path) for path in SOURCES if path.name in vague] == []


@functools.cache
def calls(path: Path) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in nodes_of(path) if isinstance(node, ast.Call)]


def test_only_one_module_makes_process_groups() -> None:
    callers = {relative(path) for path in SOURCES for name, _ in calls(path) if name.split(".")[-1] == "new_group"}
    assert callers <= {"rltrain/runtime/process_groups.py"}


def test_every_thread_ends_the_job_by_its_error() -> None:
    """A ThreadPoolExecutor passes errors to its caller."""
    starters = {"Thread", "Timer", "start_new_thread", "to_thread", "run_in_executor"}
    callers = {relative(path) for path in SOURCES for name, _ in calls(path) if name.split(".")[-1] in starters}
    assert callers == set(), "use JobThread of rltrain/runtime/machine.py"


def test_megatrons_global_parallel_state_is_never_initialised() -> None:
    callers = [relative(path) for path in SOURCES for name, _ in calls(path) if "initialize_model_parallel" in name]
    assert callers == []


READS_PICKLES_AS_DATA = "rltrain/checkpoint/megatron_pickles.py"
"""This file reads Megatron's pickles. It makes no object named in them (tests/unit/test_megatron_files.py)."""


def test_nothing_is_unpickled() -> None:
    for path in SOURCES:
        picklers = top_level_imports(path) & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
        assert not picklers or relative(path) == READS_PICKLES_AS_DATA, relative(path)
        for name, call in calls(path):
            assert name.split(".")[-1] not in PICKLING_COLLECTIVES, f"{relative(path)}: {name} pickles"
            if name == "torch.load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert keywords.get("weights_only") == "True", f"{relative(path)}: torch.load without weights_only=True"


def test_nothing_that_is_read_is_evaluated() -> None:
    """YAML makes only the objects of SafeLoader. numpy's files contain pickles only if a caller allows them."""
    for path in SOURCES:
        for name, call in calls(path):
            assert name not in {"eval", "exec", "yaml.unsafe_load", "yaml.full_load"}, f"{relative(path)}: {name}"
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert "allow_pickle" not in keywords or keywords["allow_pickle"] == "False", relative(path)
            if name == "yaml.load":
                assert keywords.get("Loader") == "PlainLoader", f"{relative(path)}: yaml.load"


OWN_PATH = {"tests/unit/test_native.py", "tools/compare_commits.py"}
"""Their processes must find only a separate tree."""


def test_child_processes_find_the_packages_that_this_one_was_given() -> None:
    """PYTHONPATH may hold the packages of a machine without a network. Files must extend it and never replace it."""
    files = [path for folder in ("launch", "tools", "tests") for path in (REPOSITORY / folder).rglob("*.py")]
    replacing = {relative(path) for path in files if re.search(r'"PYTHONPATH": str\(', path.read_text())}
    assert replacing == OWN_PATH


def declared_requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    texts = [*PYPROJECT["build-system"]["requires"], *project["dependencies"], *(t for extra in extras for t in extra)]
    return [Requirement(text) for text in texts]


def pins(file: Path = CONSTRAINTS, python: str = "3.11") -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    of_python = [pin for pin in found if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    names = [canonicalize_name(pin.name) for pin in of_python]
    assert len(set(names)) == len(names), f"{file.name} pins a package twice for Python {python}"
    return dict(zip(names, of_python, strict=True))


def test_building_needs_setuptools_only() -> None:
    assert [Requirement(text).name for text in PYPROJECT["build-system"]["requires"]] == ["setuptools"]


def test_an_installation_has_every_file() -> None:
    """This includes files outside packages with an __init__.py."""
    program = (
        "from setuptools import Distribution\n"
        "distribution = Distribution({'script_name': 'setup.py'})\n"
        "distribution.parse_config_files()\n"
        "distribution.set_defaults()\n"
        "command = distribution.get_command_obj('build_py')\n"
        "command.ensure_finalized()\n"
        "print('\\n'.join(command.get_outputs(include_bytecode=False)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed = {line.partition("/lib/")[2] for line in done.stdout.splitlines()}
    files = {relative(path) for kind in ("py", "css", "js") for path in (REPOSITORY / "rltrain").rglob(f"*.{kind}")}
    assert files - installed == set()


def test_nothing_stands_on_the_models_that_megatron_deprecates() -> None:
    """GPTModel and its neighbours may be deleted in any release after 0.19."""
    assert [relative(path) for path in SOURCES if "megatron.core.models.gpt" in path.read_text()] == []


def test_apex_is_never_a_requirement() -> None:
    folders = [path for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [file for folder in folders for file in folder.rglob("*requirements*.txt")]
    texts = [file.read_text() for file in [*files, *REPOSITORY.glob("*requirements*.txt")]]
    listed = {re.split(r"[\s=<>!~;\[]", line.strip())[0].lower() for text in texts for line in text.splitlines()}
    declared = {canonicalize_name(requirement.name) for requirement in declared_requirements()}
    assert "apex" not in listed | declared | pins().keys()
    for script in SCRIPTS:
        assert not re.search(r"install\b.*\bapex\b", script.read_text()), relative(script)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned_to_a_version_it_allows(python: str) -> None:
    pinned = pins(python=python)
    for requirement in declared_requirements():
        name = canonicalize_name(requirement.name)
        if name in ("rltrain", "setuptools"):
            continue
        assert name in pinned, f"{CONSTRAINTS.name} has no version of {name}"
        version = str(pinned[name].specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{CONSTRAINTS.name} pins {name} {version}, not {requirement}"


@pytest.mark.parametrize("file", [CONSTRAINTS, SGLANG_CONSTRAINTS], ids=relative)
def test_constraints_are_exact_and_public(file: Path) -> None:
    assert pins(file)
    for pin in pins(file).values():
        assert re.fullmatch(r"==[^*+]+", str(pin.specifier)), f"{pin}: expected name==version without a local part"


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_scripts_parse_and_kill_nothing(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"(?<![\w-])(pkill|killall|kill)(?![\w-])", script.read_text())


@pytest.mark.parametrize(
    ("script", "max_lines"),
    [("launch/quickstart.sh", 60), ("tests/run.sh", 21)]
    + [(relative(script), 40) for script in SCRIPTS if script.parent.name == "slurm"],
)
def test_scripts_are_short(script: str, max_lines: int) -> None:
    assert len((REPOSITORY / script).read_text().splitlines()) <= max_lines
