"""A tree of verl beside a script, with its own defaults and rewards. Also the rewards that verl selects by a row's
data_source."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rltrain.config.loader import PlainLoader
from rltrain.errors import listed
from rltrain.import_config.influence import BY_ROW, REWARD, defaults_of, equal
from rltrain.import_config.translation import (
    NOTHING,
    WITHOUT_COMPARISON,
    SourceKeys,
    Translation,
    Tree,
    file_near,
    flattened,
    set_signed_math,
)

TREES = ("", "verl/", "src/")
"""Folders of a repository that can have a tree of verl."""
CONFIGS = ("verl/trainer/config/_generated_ppo_trainer.yaml", "verl/trainer/config/ppo_trainer.yaml")
OF_DAPO = "recipe/dapo/config/dapo_trainer.yaml"


def file_of_tree(folder: Path, name: str) -> Path | None:
    """Returns a file of the tree of verl beside a script in `folder`, or None."""
    return next((found for tree in TREES if (found := file_near(folder, tree + name)) is not None), None)


def tree_beside(folder: Path, keys: Mapping[str, Any]) -> Tree:
    """Returns what the tree of verl beside a script in `folder` has of its own."""
    return Tree(_defaults(folder, str(keys.get("-m", "")).endswith("main_dapo")), *_selecting(folder))


def _defaults(folder: Path, of_dapo: bool) -> dict[str, Any]:
    """Returns the defaults that differ from the release's. Values that follow from others are left out."""
    paths = [path for name in CONFIGS if (path := file_of_tree(folder, name)) is not None][:1]
    if of_dapo and (path := file_of_tree(folder, OF_DAPO)) is not None:
        paths.append(path)
    found: dict[str, Any] = {}
    for path in paths:
        found |= flattened(yaml.load(path.read_text(encoding="utf-8"), Loader=PlainLoader))  # noqa: S506 (a SafeLoader)
    known = defaults_of("verl")
    return {
        key: value
        for key, value in found.items()
        if value not in (*NOTHING, [], {}, "???") and "${" not in str(value) and not _follows(key, value)
        if key not in known or not equal(value, known[key])
    }


def _follows(key: str, value: Any) -> bool:
    """Returns whether a bound is negative, which means that it follows from clip_ratio."""
    return ".clip_ratio" in key and isinstance(value, int | float) and value < 0


# Rewards. Without a function of the user, verl selects one by the column data_source of each row.

SCORES, MAIN = "verl/utils/reward_score/__init__.py", "verl/trainer/main_ppo.py"
SELECTING = ("default_compute_score", "_default_compute_score", "_select_rm_score_fn")
SOURCES = frozenset(
    (
        *("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        *(
            "math_dapo",
            "math",
            "math_dapo_reasoning",
            "aime",
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
        ),
        *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads", "codecontests", "apps", "codeforces", "taco"),
        *("hiyouga/geometry3k", "searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"),
        *("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
    )
)
"""The values of data_source that verl knows."""
ARGUMENTS = {
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("sandbox_fusion_url", "concurrent_semaphore", "memory_limit_mb"),
}
"""Arguments of verl's function. The last three have defaults."""
FILES = "data.train_files"
KINDS = {"gsm8k": re.compile("gsm8k", re.I), "dapo": re.compile("dapo|aime", re.I), "math": re.compile("math", re.I)}
"""Kinds of data by the names of their files."""


def set_selected_reward(keys: SourceKeys, out: Translation) -> None:
    """Sets the reward of a run without a reward function of the user.

    Files named after GSM8K, MATH or DAPO have the comparison of answers of verl's function for them. Others have
    verl's function itself, or that of the tree beside the script if it knows more kinds of data.
    """
    if "reward.function" in out.fixed or "reward.functions" in out.fixed:
        return
    function, more = keys.tree.selects, keys.tree.knows
    if more and function == SELECTING[-1]:
        out.differs(FILES, keys.get(FILES), f"{more} of {MAIN} beside the script gives the reward; {ASKED}", REWARD)
        return
    if more == UNCALLABLE:
        told = f"{function} of {SCORES} beside the script needs other arguments; {ASKED}"
        out.differs(FILES, keys.get(FILES), told, REWARD)
        return
    given = out.get("data.train.path")
    files = [str(one) for one in (given if isinstance(given, list) else [given])]
    kinds = {next((kind for kind, name in KINDS.items() if name.search(file)), "") for file in files}
    if more or not kinds <= {*KINDS}:
        name = f"verl.utils.reward_score:{function or SELECTING[0]}"
        out.set("reward.function", name, f"{more or BY_ROW} selects it; needs the package verl")
    elif "dapo" in kinds:
        if kinds != {"dapo"}:
            out.notes.append("reward.function: all rows have the reward of DAPO's, by the names of the files")
        set_signed_math(out, FILES, "files of DAPO", WITHOUT_COMPARISON)
    else:
        _set_answers(kinds, out)


ASKED = "set your function as reward.function: docs/rewards.md"
UNCALLABLE = "other arguments"


def _set_answers(kinds: set[str], out: Translation) -> None:
    out.set("reward.function", "math", "verl selects it by data_source; the files are named after mathematics")
    if kinds == {"gsm8k"}:
        out.set("reward.options", {"after": ["####"]}, "verl reads the number after #### of gsm8k")
        return
    out.set("reward.options", {"last_number": False}, "verl reads the content of the last box of MATH")
    if "gsm8k" in kinds:
        out.notes.append("reward.options: a box is an answer for gsm8k too here, and not only the number after ####")


def _selecting(folder: Path) -> tuple[str, str]:
    """Returns the name of the function that selects rewards in the tree beside a script in `folder`, and what it knows
    beyond verl. Both are empty without a tree."""
    for place in (MAIN, SCORES):
        path = file_of_tree(folder, place)
        for node in ast.walk(ast.parse("" if path is None else path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in SELECTING:
                names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
                other = place == SCORES and bool(names - ARGUMENTS)
                return node.name, UNCALLABLE if other else _beyond(node)
    return "", ""


def _beyond(function: ast.FunctionDef) -> str:
    """Returns the kinds of data that a selecting function knows and verl does not, or its own rule for all others."""
    texts = {
        one.value
        for node in ast.walk(function)
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and "startswith" in ast.dump(node.func))
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
    if others := sorted(texts - SOURCES):
        return f"data_source {listed(others)}"
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(function))
    return "" if raises else "every other data_source"
