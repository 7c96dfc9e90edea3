"""`dagengine`: finds the command, runs it, and turns errors of ours into one line and an exit status.

Exit status: what the command returns; 1 for a refusal, 2 for wrong usage, 130 when interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from .commands import OWN, CommandBroken, find_commands
from .console import error_line, is_refusal, say, suggestion


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"dagengine {version('dagengine')} (server {version(OWN)})")
        return 0
    commands = find_commands()
    name, rest = given[0], given[1:]
    if name not in commands:
        kind = "option" if name.startswith("-") else "command"
        hint = suggestion(name, commands)
        say(f"error: no such {kind}: {name!r}{hint} (`dagengine --help` lists the commands)")
        return 2
    try:
        return commands[name].run(rest)
    except CommandBroken as error:
        say(f"error: the command {name!r} of {commands[name].distribution} cannot be used: {error}")
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not is_refusal(error):
            raise
        say(error_line(error))
        return 1


def usage() -> str:
    """The list of commands."""
    commands = find_commands()
    width = max((len(name) for name in commands), default=0)
    lines = [f"  {name:<{width}}  {command.summary()}" for name, command in commands.items()]
    head = "usage: dagengine COMMAND [OPTIONS]"
    about = "Serve language models whose requests read each other's KV state."
    foot = "`dagengine COMMAND --help` describes a command."
    return "\n".join([head, "", about, "", "commands:", *lines, "", foot])
