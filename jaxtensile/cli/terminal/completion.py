"""``jaxtensile completion``: a shell's completion of the command line, made from its parser.

Commands, options and the values that an option allows; everything else is completed as files are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from jaxtensile.devices.profiles import targets

_PROGRAM: Final = "jaxtensile"
_TARGET: Final = "--target"


@dataclass(frozen=True, slots=True)
class Command:
    """What a command is for, its options with what each says, and the values that some allow."""

    help: str
    options: Mapping[str, str]
    values: Mapping[str, tuple[str, ...]]


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Command]:
    """The commands of a parser that are listed in its help."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    listed = {choice.dest: str(choice.help or "") for choice in commands._choices_actions}
    return {name: _command(found, listed[name]) for name, found in commands.choices.items() if name in listed}


def _command(parser: argparse.ArgumentParser, about: str) -> Command:
    options: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        for name in action.option_strings:
            options[name] = str(action.help or "").replace("%%", "%").replace("%(prog)s", parser.prog)
            if action.choices is not None:
                values[name] = tuple(map(str, action.choices))
            elif name == _TARGET:
                values[name] = tuple(targets())
        if not action.option_strings and action.choices is not None:
            values[""] = tuple(map(str, action.choices))
    return Command(about, options, values)


def bash(commands: Mapping[str, Command]) -> str:
    """For ``source <(jaxtensile completion bash)``."""
    lines = [
        f"_{_PROGRAM}() {{",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local command="${COMP_WORDS[1]}" words=""',
        "  if [ $COMP_CWORD -eq 1 ]; then",
        f'    COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$word")); return',
        "  fi",
        '  case "$command $before" in',
    ]
    for name, command in commands.items():
        lines += [f'    "{name} {o}") words="{" ".join(v)}" ;;' for o, v in command.values.items() if o]
    lines += ["  esac", '  if [ -z "$words" ]; then case "$command" in']
    for name, command in commands.items():
        words = " ".join((*command.values.get("", ()), *command.options))
        lines.append(f'    {name}) words="{words}" ;;')
    lines += [
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        f"complete -o default -F _{_PROGRAM} {_PROGRAM}",
    ]
    return "\n".join(lines)


def zsh(commands: Mapping[str, Command]) -> str:
    """For a file ``_jaxtensile`` in a folder of ``$fpath``, or ``source <(jaxtensile completion zsh)``."""
    lines = [f"#compdef {_PROGRAM}", f"_{_PROGRAM}() {{", "  if (( CURRENT == 2 )); then", "    local -a commands=("]
    lines += [f"      {_quoted(f'{name}:{command.help}')}" for name, command in commands.items()]
    lines += ["    )", "    _describe command commands; return", "  fi", '  case "$words[2] $words[CURRENT-1]" in']
    for name, command in commands.items():
        lines += [f'    "{name} {o}") compadd -- {" ".join(v)}; return ;;' for o, v in command.values.items() if o]
    lines += ["  esac", '  case "$words[2]" in']
    for name, command in commands.items():
        lines += [f"    {name})", "      local -a options=("]
        lines += [f"        {_quoted(f'{option}:{about}')}" for option, about in command.options.items()]
        given = command.values.get("")
        lines += ["      )", "      _describe option options" + (f"; compadd -- {' '.join(given)}" if given else "")]
        lines.append("      _files ;;")
    lines += ["  esac", "}", f'if [ "$funcstack[1]" = "_{_PROGRAM}" ]; then _{_PROGRAM}; else']
    return "\n".join((*lines, f"  compdef _{_PROGRAM} {_PROGRAM}", "fi"))


def fish(commands: Mapping[str, Command]) -> str:
    """For ``jaxtensile completion fish | source``."""
    first = f"complete -c {_PROGRAM} -n __fish_use_subcommand -f"
    lines = [f"{first} -a {name} -d {_quoted(command.help)}" for name, command in commands.items()]
    for name, command in commands.items():
        head = f"complete -c {_PROGRAM} -n {_quoted(f'__fish_seen_subcommand_from {name}')}"
        for option, about in command.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = command.values.get(option)
            more = f" -x -a {_quoted(' '.join(values))}" if values else ""
            lines.append(f"{head} {kind}{more} -d {_quoted(about)}")
        if given := command.values.get(""):
            lines.append(f"{head} -f -a {_quoted(' '.join(given))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: Final = {"bash": bash, "zsh": zsh, "fish": fish}

__all__ = ["SHELLS", "Command", "commands_of"]
