"""Every example of README.md and docs/ works as it stands: configs are dry-run, programs are run, rows are read."""

import asyncio
import copy
import json
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltrain.config.loader import Source, read_source, validated
from rltrain.environments.agent import SESSION, AgentEnvironment
from rltrain.environments.interface import StepResult
from rltrain.errors import UserError
from rltrain.planning.description import describe
from rltrain.planning.hardware import gpu_named
from rltrain.planning.options import DryRunOptions
from rltrain.sandbox.means import means
from tests.talking_engine import byte_tokenizer, endpoint
from tests.unit.documented_commands import PAGES
from tests.unit.documented_examples import (
    BASE,
    EXAMPLES,
    Example,
    configs_of,
    of_language,
    overrides_of,
    settings_of,
    write_files,
)

REPOSITORY = Path(__file__).resolve().parents[2]
WORLDS = (8, 16)
GPU_KEYS = ("memory_gb", "tflops")
ROW = {
    **{
        "prompt": "1+1=",
        "label": "2",
        "response": "2",
        "question": "Why?",
        "answer": "So.",
        "level": 1,
        "teacher": "math",
    },
    "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
}
READERS_FILES = ("my_reward.py", "rewards/form.py")
"""Functions that pages leave to their reader."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what a reader has: a tokenizer, rows and functions."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    for name in ("rows.jsonl", "gsm8k/train.jsonl", "train.jsonl", "eval.jsonl", "aime.jsonl", "talks.jsonl"):
        rows = tmp_path / name
        rows.parent.mkdir(exist_ok=True)
        rows.write_text(f"{json.dumps(ROW)}\n" * 8)
    for name in READERS_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def score(prompt, response, label):\n    return 0.0\n")
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    return tmp_path


def read(text: str) -> dict[str, Any]:
    """Returns YAML as configs are read."""
    path = Path("block.yaml")
    path.write_text(text)
    return read_source(path).data


def refusals(example: Example, values: Mapping[str, Any]) -> Iterator[str]:
    """Yields why the config is refused, in each of WORLDS."""
    for world in WORLDS:
        try:
            describe(validated(Source(dict(values), example.title)), DryRunOptions(world, 8))
        except UserError as error:
            yield f"{world} ranks: {error}"


def check(example: Example) -> None:
    """AssertionError where no reader can use the config."""
    own = read(example.text)
    if own.keys() >= {*GPU_KEYS}:
        gpu_named("block.yaml")
        return
    said = []
    for values in configs_of(example, read):
        found = [*refusals(example, values)]
        if len(found) < len(WORLDS):
            return
        said += found
    raise AssertionError("\n".join([f"{example.title} is refused:", *dict.fromkeys(said)]))


@pytest.mark.parametrize("example", of_language("yaml"), ids=lambda example: example.title)
def test_a_config_is_accepted(example: Example, folder: Path) -> None:
    write_files(example.page, folder)
    check(example)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout: {engin: sglang}", "engin: unknown key"),
        ("actor: {optimizer: {name: adamw, muon: {momentum: 0.9}}}", "optimizer.muon"),
        ("reward: {function: 'missing.py:score'}", "there is no file 'missing.py'"),
        ("data: {train: {path: rows.jsonl, label_key: labels}}", "no key 'labels'"),
        ("data: {train: {path: rows.jsonl, prompt_key: empty}}", "no key 'empty'"),
    ],
)
def test_a_config_that_is_refused_is_found(text: str, expected: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match=expected):
        check(Example("README.md", 0, "yaml", text, ""))


SETTINGS = [one for page in PAGES if page.parent.name != "coming_from" for one in settings_of(page)]
"""The pages of coming_from/ quote settings of other trainers beside ours."""
STANDS_FOR_VALUES = {
    "checks: {max_logprob_diff: ..., max_kl: ...}": "leaves out numbers",
    "advantages.overlong_penalty: {buffer_tokens: B, factor: f}": "letters for numbers",
    "preference.center_coef: c": "a letter for a number",
    "loss.kl.adaptive: {target, horizon}": "names of keys",
    "reward.functions: [{function, weight, name}]": "names of keys",
}


@pytest.mark.parametrize(("page", "setting"), [one for one in SETTINGS if one[1] not in STANDS_FOR_VALUES])
def test_a_setting_in_a_sentence_is_one(page: str, setting: str) -> None:
    source = Source(copy.deepcopy({**BASE, "placement": {"actor": 0}}), page)
    for override in overrides_of(setting):
        source.override(override)
    validated(source)


@pytest.mark.parametrize("example", of_language("json"), ids=lambda example: example.title)
def test_rows_are_json(example: Example) -> None:
    assert all(isinstance(json.loads(line), dict) for line in example.text.splitlines())


PROGRAMS = [example for example in of_language("python") if example.file is None]
"""Of the others a page's configs and programs make use."""


@pytest.mark.parametrize("example", PROGRAMS, ids=lambda example: example.title)
def test_a_program_runs(example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.page == "docs/sandbox.md" and not any(finding.works for finding in means().values()):
        pytest.skip("this machine has no sandbox")
    write_files(example.page, folder)
    (folder / "program.py").write_text(example.text)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    runpy.run_path("program.py", run_name="__main__")


@pytest.mark.slow
def test_the_agent_of_the_page_is_an_episode(folder: Path) -> None:
    write_files("docs/endpoint.md", folder)
    config = yaml.safe_load(next(one.text for one in of_language("yaml") if one.page == "docs/endpoint.md"))
    with endpoint(lambda context: f"I say: {ROW['answer']}") as served:
        opened = served.server.open_session(None, seed=3)
        session = {"url": f"{served.url}/sessions/{opened.id}", "token": opened.token}
        agent = AgentEnvironment(**config["env"]["agent"], sandbox="none", limits={"wall_s": 300})
        (result,) = asyncio.run(agent.reset([{**ROW, SESSION: session}], [0]))
        assert isinstance(result, StepResult) and (result.reward, result.info["rewarded"]) == (1.0, 1.0)
        assert len(served.record(opened.id).trajectories) == 1


def test_what_stands_for_values_is_on_a_page() -> None:
    assert STANDS_FOR_VALUES.keys() <= {setting for _, setting in SETTINGS} and len(SETTINGS) > 50


def test_every_block_is_of_a_known_kind() -> None:
    """Those without a language are commands, or show what is printed: see test_documented_commands.py."""
    unknown = [example.title for example in EXAMPLES if example.language not in ("", "text", "yaml", "python", "json")]
    assert not unknown
