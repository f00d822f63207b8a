"""The project's own files agree: workflows, make targets, addresses, the supported versions of torch and Python."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from folders import ROOT

from autoremat.basics import errors

PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow: Path) -> list[str]:
    """The commands of all steps of all jobs of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_exists(workflow):
    found = commands(workflow)
    assert found
    for command in found:
        words = re.sub(r'"[^"]*"|\$\{\{.*?\}\}', "", command).split()
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= TARGETS
        elif words[0].startswith(".ci/"):
            assert (ROOT / words[0]).stat().st_mode & 0o100


def test_the_workflow_covers_every_supported_torch_and_python():
    (ci,) = (path for path in WORKFLOWS if path.name == "ci.yml")
    matrix = yaml.safe_load(ci.read_text())["jobs"]["quick"]["strategy"]["matrix"]
    assert [int(torch.split(".")[1]) for torch in matrix["torch"]] == list(errors.SUPPORTED_MINORS)
    pythons = {*matrix["python"], *(case["python"] for case in matrix["include"])}
    assert pythons == set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT))


def test_messages_name_the_address_of_the_metadata():
    assert f'Issues = "{errors.ISSUES}"' in PROJECT
    for make in (errors.planning_error, errors.fallback_message):
        assert errors.ISSUES in str(make(ValueError("x"), "a place"))


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 140
    assert max(map(len, lines)) <= 100


def test_the_files_that_the_contributors_page_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`([a-z_/]+\.pyi?)`", text):
        assert (ROOT / name).exists() or (ROOT / "autoremat" / name).exists(), name
    assert set(re.findall(r"make ([a-z-]+)", text)) <= TARGETS


def test_programs_import_names_that_the_package_has():
    for path in [*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoremat."):
                module = importlib.import_module(node.module)
                absent = [one.name for one in node.names if not hasattr(module, one.name)]
                assert not [name for name in absent if importlib.util.find_spec(f"{node.module}.{name}") is None], path
