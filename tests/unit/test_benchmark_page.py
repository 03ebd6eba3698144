"""The page of benchmarks has the numbers of its results, all of a section's from the same runs."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = REPOSITORY / "docs/benchmarks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools/benchmarks")
    return importlib.import_module("page")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the results and the template."""
    return Path(shutil.copytree(DOCUMENTS, tmp_path / "benchmarks"))


def run_main(page: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["page.py", *map(str, arguments)])
    page.main()


def test_the_page_is_what_its_results_make_it(page):
    assert (DOCUMENTS / "cpu.md").read_text() == page.render(DOCUMENTS), "python tools/benchmarks/page.py writes it"


def test_results_of_different_machines_make_no_page(page, folder):
    plan = folder / "cpu/plan.json"
    data = json.loads(plan.read_text())
    data["machine"]["cores"] = 96
    plan.write_text(json.dumps(data))
    with pytest.raises(SystemExit, match='different machines: .*"cores": 96'):
        page.render(folder)


def weight_sync_run(ours: float, refit: float, ranks: int = 2) -> dict[str, Any]:
    times = {"ours": ours, "ours_wire": 100.0, "refit": refit, "gather_broadcast": 300.0, "raw": 50.0}
    milliseconds = {"default": {name: {"median": value} for name, value in times.items()}}
    return {"ranks": ranks, "src": "tp2", "dst": "tp1", "milliseconds": milliseconds}


def test_the_table_has_the_middle_run_and_the_sentences_have_all_of_them(page):
    runs = [weight_sync_run(40, 160), weight_sync_run(20, 200), weight_sync_run(30, 150), weight_sync_run(50, 100, 4)]
    found = page.SECTIONS["weight_sync"].describe(runs)
    assert "| TP2 -> TP1, 2 ranks | default | 30 | 100 | 150 | 300 | 50 | 5.00 | 0.60 |" in found["table"]
    assert found["refit_over_ours_2"] == "4.0 to 10.0" and found["refit_over_ours_4"] == "2.0"
    assert found["ours_over_raw"] == "0.40 to 1.00" and found["refit_over_wire"] == "1.0 to 2.0"
    assert found["runs"] == "1 to 3"


def printing(found: object) -> str:
    return f"python -c 'print(\"a table\"); print({json.dumps(json.dumps(found))})'"


def test_a_section_that_is_measured_changes_its_table(page, folder, monkeypatch):
    result = json.loads((folder / "cpu/convert.json").read_text())["runs"][0]["result"]
    section = page.Section((printing(result | {"idle_mb": 777}),), page.SECTIONS["convert"].describe)
    monkeypatch.setitem(page.SECTIONS, "convert", section)
    machine = dict(reversed(machine_of(folder).items()))
    monkeypatch.setattr(page, "describe_machine", lambda device: {"date": "2030-01-01", **machine})
    monkeypatch.setattr(page, "version", lambda package: machine_of(folder)[package])
    run_main(page, monkeypatch, "--measure", "convert", "--folder", folder)
    text = (folder / "cpu.md").read_text()
    assert "beyond the 777 MB of the idle" in text and "to 2030-01-01" in text
    assert json.loads((folder / "cpu/convert.json").read_text())["runs"][0]["command"] == section.commands[0]


def machine_of(folder: Path) -> dict[str, Any]:
    machine: dict[str, Any] = json.loads((folder / "cpu/convert.json").read_text())["machine"]
    return machine


def test_a_benchmark_that_fails_leaves_the_results_as_they_were(page, folder, monkeypatch):
    before = (folder / "cpu/plan.json").read_text()
    failing = page.Section((printing({}), "python -c 'raise SystemExit(3)'"), page.SECTIONS["plan"].describe)
    monkeypatch.setitem(page.SECTIONS, "plan", failing)
    with pytest.raises(SystemExit, match="ended with status 3"):
        run_main(page, monkeypatch, "--measure", "plan", "--folder", folder)
    assert (folder / "cpu/plan.json").read_text() == before
