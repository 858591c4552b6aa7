"""README.md: its commands, its example and its tree are what the repository does."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import headrace

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKSPACE = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8")


def block(name):
    """The code between `<!-- name -->` and `<!-- end -->`."""
    pattern = rf"<!-- {name} -->\n```\w*\n(.*?)```\n<!-- end -->"
    (code,) = re.findall(pattern, README, re.DOTALL)
    return code


def test_both_set_up_commands_are_single_lines_that_make_their_own_environment():
    for name in ("run-command", "test-command"):
        (line,) = block(name).splitlines()
        make, install, run = line.split(" && ")
        assert shlex.split(make) == ["python3.12", "-m", "venv", ".venv"]
        assert shlex.split(install)[:3] == [".venv/bin/pip", "install", "-e"]
        assert shlex.split(run)[0] == ".venv/bin/python"
    assert "-m headrace.scripts.generate " in block("run-command")
    assert block("test-command").endswith("-m pytest\n")


def test_ci_takes_the_test_command_from_the_readme():
    # The extraction is that of .ci/run, so that a change of either shows here.
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    start = script.index("test_command=$(")
    extraction = script[start : script.index("|| true)", start) + len("|| true)")]
    code = f'{extraction}; printf "%s" "$test_command"'
    done = subprocess.run(
        ["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == block("test-command").strip()
    assert "pytest" not in script.replace(extraction, "")


def test_example_is_short_and_compiles():
    code = block("example")
    assert len(code.splitlines()) <= 10
    compile(code, "README.md", "exec")


@pytest.mark.real_model
def test_example_runs_as_printed(smollm_llm, monkeypatch, capsys):
    # The engine is built with fewer shapes than the example's, to save a minute.
    monkeypatch.setattr(headrace, "LLM", lambda model: smollm_llm, raising=False)
    exec(compile(block("example"), "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "The capital of France is ->" in out and "Paris" in out


@pytest.mark.real_model
def test_run_command_streams_an_answer(monkeypatch):
    (line,) = block("run-command").splitlines()
    words = shlex.split(line.split(" && ")[2])
    few_shapes = ["--num_slots=8", "--max_context_len=1024", "--max_tokens=24"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".typing"))
    done = subprocess.run(
        [sys.executable, *words[1:], *few_shapes],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sky" in done.stdout
    assert "+ 24 tokens" in done.stderr


def test_tree_names_the_folders_that_exist():
    tree = README.split("## Tree")[1].split("```")[1]
    named = {line.split("/")[0] for line in tree.splitlines() if line}
    folders = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")}
    assert named - {"tests"} == folders - {"tests"}


def test_workspace_has_one_remark_for_every_file_of_the_package():
    folders = ("configs", "pallas_kernels", "layers", "checkpoints", "engine")
    paths = [p for f in (*folders, "scripts") for p in (ROOT / f).rglob("*.py")]
    written = [p for p in paths if p.stem != "__init__" and "_pb2" not in p.stem]
    names = {p.relative_to(ROOT).as_posix() for p in written}
    folder, listed = "", set()
    for line in WORKSPACE.split("```")[1].splitlines():
        if re.match(r"\S+/( |$)", line):
            folder = line.split()[0]
        elif match := re.match(r"  (\S+\.py) +\S", line):
            listed.add(folder + match[1])
    assert sorted(names - listed) == []
    assert sorted(listed - names) == []
