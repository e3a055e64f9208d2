"""docs/commands.md is what the commands say of themselves, and the other pages name commands that exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from api.cli import _app
from api.cli.reference import reference

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/getting-started.md", "docs/how-scoring-works.md"]


def test_the_reference_is_current():
    assert (ROOT / "docs" / "commands.md").read_text() == reference(), "run `make docs`"


def test_no_list_of_commands_cuts_a_summary():
    def summaries(command, limit=60):
        for name, child in getattr(command, "commands", {}).items():
            yield name, child.get_short_help_str(limit)
            yield from summaries(child)

    assert [(name, said) for name, said in summaries(get_command(_app())) if said.endswith("...")] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_in_the_docs_exists_with_its_options(page):
    lines = re.findall(r"^    (?:\.venv/bin/)?(modelkin .*)$", (ROOT / page).read_text(), re.MULTILINE)
    for line in lines:
        words = shlex.split(line.split(" #")[0])[1:]
        command = get_command(_app())
        while getattr(command, "commands", None):
            name = words.pop(0)
            assert name in command.commands, line
            command = command.commands[name]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= known | {"--help"}, line
