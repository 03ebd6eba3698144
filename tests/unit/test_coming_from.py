"""The pages for users of other trainers: made from the rules that imports work by, and naming keys that exist."""

import re

import pytest

from rltrain.config.explain import all_keys
from rltrain.import_config.pages import FOLDER, PAGES, TEMPLATE, modules_of, page
from rltrain.import_config.sources import FRAMEWORKS

KEYS = set(all_keys())


def is_key(path: str) -> bool:
    return path in KEYS or path.startswith("rollout.sglang.args.")  # SGLang's own


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_page_is_what_the_rules_make(framework: str) -> None:
    found = (FOLDER / f"{framework}.md").read_text()
    assert found == page(framework), "run: python -m rltrain.import_config.pages"
    assert found.count("\n| `") > 30, "its tables have the rules"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_keys_that_a_template_names_here_exist(framework: str) -> None:
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", (FOLDER / f"{framework}{TEMPLATE}").read_text(), re.MULTILINE)
    named = [key for _, here in rows for key in re.findall(r"`([a-z_]+\.[a-z_0-9.]+)(?=[:`])", here)]
    assert len(named) >= 2
    assert [key for key in named if not key.endswith(".py") and not is_key(key)] == []


def test_every_framework_that_imports_has_a_page() -> None:
    assert set(PAGES) == set(FRAMEWORKS)
    assert all([*modules_of(framework)] for framework in PAGES)
