"""The reference of every command, from the commands themselves: `python -m api.cli.reference > docs/commands.md`."""

from __future__ import annotations

import sys
from typing import Any


def reference() -> str:
    """Markdown; a test holds docs/commands.md to it."""
    from typer.main import get_command

    from api.cli import _app

    lines = [
        "# Commands",
        "",
        "Made by `make docs` from the commands' own help. Every read takes `--format auto|table|json|csv|quiet`;",
        "data goes to stdout, talk to stderr (`modelkin -q …` silences it).",
        "",
    ]
    for words, command in _leaves(get_command(_app()), ["modelkin"]):
        lines += _section(words, command)
    return "\n".join(lines).rstrip() + "\n"


def _leaves(command: Any, words: list[str]) -> list[tuple[list[str], Any]]:
    children = getattr(command, "commands", None)
    if not children:
        return [(words, command)]
    return [leaf for name, child in children.items() for leaf in _leaves(child, [*words, name])]


def _section(words: list[str], command: Any) -> list[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
    usage = " ".join([*words, *(_argument(one) for one in arguments)])
    lines = [f"## {' '.join(words[1:])}", "", f"    {usage}", "", " ".join((command.help or "").split()), ""]
    described = [(_argument(one), one.help) for one in arguments if one.help] + [
        (", ".join([*one.opts, *one.secondary_opts]), _option_help(one)) for one in options
    ]
    if described:
        lines += ["| | |", "| --- | --- |"]
        lines += [
            f"| `{name}` | {' '.join((text or '').split()).replace('|', chr(92) + '|')} |" for name, text in described
        ]
        lines.append("")
    return lines


def _argument(parameter: Any) -> str:
    name = parameter.metavar or (parameter.name or "").upper()
    return name if parameter.required else f"[{name}]"


def _option_help(parameter: Any) -> str:
    default = parameter.default
    if callable(default) or default in (None, False, True, "", 0, [], ()):
        return parameter.help or ""
    return f"{parameter.help or ''} Default: {getattr(default, 'value', default)}."


if __name__ == "__main__":
    sys.stdout.write(reference())
