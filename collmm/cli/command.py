"""What a command of the command line is, and how its arguments are read and explained."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

from collmm.errors import OptionError

_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
      name: as it is typed.
      arguments: what stands after the name, such as ``"PROGRAM"``.
      summary: one line for the list of commands.
      details: further text for the command's own help, paragraphs apart by empty lines.
      define: defines the command's flags in the ``FlagValues`` it is given.
      main: ``(arguments, flags) -> exit status``; raises CollmmError for bad input.
    """

    name: str
    arguments: str
    summary: str
    details: str
    define: Callable[[flags.FlagValues], None]
    main: Callable[[Sequence[str], flags.FlagValues], int]

    def parse(self, argv: Sequence[str]) -> tuple[list[str], flags.FlagValues]:
        """Return (arguments, flags) of a command line; flags may stand anywhere in it.

        Raises OptionError for a flag that is unknown or has a value that is not allowed.
        """
        values = self.flags()
        try:
            _, *arguments = values([self.name, *argv])
        except flags.Error as e:
            text = " ".join(str(e).split())
            raise OptionError(f"{text}; see collmm {self.name} --help") from None
        return arguments, values

    def flags(self) -> flags.FlagValues:
        """Return the command's flags with their defaults, and those that every command has."""
        values = flags.FlagValues()
        values.set_gnu_getopt(True)
        self.define(values)
        flags.DEFINE_boolean("verbose", False, "Log what is done.", flag_values=values)
        flags.DEFINE_boolean("help", False, "Print this.", short_name="h", flag_values=values)
        return values

    def help(self) -> str:
        """Return the command's help."""
        values = self.flags()
        lines = [f"usage: collmm {self.name} {self.arguments} [flags]", "", self.summary, ""]
        for paragraph in self.details.split("\n\n"):
            lines += [textwrap.fill(" ".join(paragraph.split()), _WIDTH), ""]
        lines.append("flags:")
        # In the order in which they were defined.
        for flag in dict.fromkeys(values[name] for name in values):
            lines += _flag_help(flag)
        return "\n".join(lines)


def _flag_help(flag: flags.Flag) -> list[str]:
    head = f"  --{flag.name}" + (f", -{flag.short_name}" if flag.short_name else "")
    if not flag.boolean:
        head += f" {flag.name.upper()}"
    return [head, textwrap.indent(textwrap.fill(flag.help, _WIDTH - 6), " " * 6)]
