"""What the README says is true of the code."""

import re
from pathlib import Path

from collmm import Options, Reason

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_reasons_are_those_of_the_code():
    block = README.split("<!-- reasons -->")[1].split("<!-- end of reasons -->")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", block, re.MULTILINE)
    assert rows == [(reason.code, reason.meaning) for reason in Reason]


def test_the_options_named_are_the_options_there_are():
    shown = re.search(r"Options\(\s*(policy=[^)]*)\)", README)
    assert shown is not None
    names = re.findall(r"(\w+)=", shown[1])
    assert names == list(Options.__dataclass_fields__)


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- test command -->" in script
    command = README.split("<!-- test command -->\n```sh\n")[1].split("\n")[0]
    assert command.startswith("python -m venv .venv-test && ")
    assert "pytest" in command


def test_every_file_the_readme_names_is_there():
    for name in re.findall(r"`(examples/[\w.]+|\w+\.md)`", README):
        assert (ROOT / name).is_file(), name
