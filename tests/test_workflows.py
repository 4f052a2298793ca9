"""The GitHub workflows, which do not run here, against the rules of their documented syntax.

https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax: which keys there are, what a step is.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

TOP = {"name", "run-name", "on", "permissions", "env", "defaults", "concurrency", "jobs"}
JOB = {"name", "permissions", "needs", "if", "runs-on", "environment", "concurrency", "outputs", "env", "defaults",
       "steps", "timeout-minutes", "strategy", "continue-on-error", "container", "services"}  # fmt: skip
STEP = {"id", "if", "name", "uses", "run", "working-directory", "shell", "with", "env", "continue-on-error",
        "timeout-minutes"}  # fmt: skip
STRATEGY = {"matrix", "fail-fast", "max-parallel"}
EVENTS = {"push": {"branches", "branches-ignore", "tags", "tags-ignore", "paths", "paths-ignore"},
          "pull_request": {"types", "branches", "branches-ignore", "paths", "paths-ignore"},
          "workflow_dispatch": {"inputs"}}  # fmt: skip
# Inputs that these actions take, by their action.yml.
ACTIONS = {
    "actions/checkout": {"ref", "fetch-depth"},
    "actions/setup-python": {"python-version", "cache", "cache-dependency-path"},
    "actions/upload-artifact": {"name", "path", "if-no-files-found"},
}


def read(path: Path) -> dict:
    loaded = yaml.safe_load(path.read_text())
    loaded["on"] = loaded.pop(True)  # YAML 1.1 reads the key `on` as true
    return loaded


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_keeps_to_the_syntax(path):
    workflow = read(path)
    assert set(workflow) <= TOP and {"on", "jobs"} <= set(workflow)
    for event, filters in workflow["on"].items():
        assert set(filters or ()) <= EVENTS[event]
    for name, job in workflow["jobs"].items():
        assert re.fullmatch("[A-Za-z_][A-Za-z0-9_-]*", name)
        assert set(job) <= JOB and {"runs-on", "steps"} <= set(job)
        strategy = job.get("strategy", {})
        assert set(strategy) <= STRATEGY
        known = {f"matrix.{key}" for key in strategy.get("matrix", {})} | {"github.workflow", "github.ref"}
        assert set(re.findall(r"\$\{\{ *([\w.]+) *\}\}", path.read_text())) <= known
        for step in job["steps"]:
            assert set(step) <= STEP and ("uses" in step) != ("run" in step)
            if "uses" in step:
                action, version = step["uses"].split("@")
                assert re.fullmatch(r"v\d+", version) and set(step.get("with", ())) <= ACTIONS[action]
            else:
                bash = shutil.which("bash")
                if bash is not None:
                    subprocess.run([bash, "-n"], input=step["run"], text=True, check=True)


def test_ci_runs_the_projects_own_command_on_the_oldest_python():
    job = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]
    assert job["steps"][-1] == {"run": ".ci/run"}
    versions = job["strategy"]["matrix"]["python"]
    assert all(isinstance(version, str) for version in versions)  # 3.10 would be the number 3.1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions[0]}"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
