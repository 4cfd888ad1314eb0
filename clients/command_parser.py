"""How the terminal tools read their arguments."""

import argparse
import difflib
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """The arguments of ``penstock NAME``: flags are written out, the epilog is shown as it is, and what is wrong is
    said in one line, not below a page of usage."""

    def __init__(self, name: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"penstock {name}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        told = f"{message.removeprefix('argument ')}{self._suggestion(message)}"
        self.exit(2, f"{self.prog}: {told}; {self.prog} --help lists the flags\n")

    def _suggestion(self, message: str) -> str:
        """Returns a question that names the flag nearest to the first unknown one, or nothing."""
        _, unrecognized, arguments = message.partition("unrecognized arguments: ")
        if not unrecognized or not arguments.startswith("--"):
            return ""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = difflib.get_close_matches(arguments.split()[0].partition("=")[0][:100], known, n=1)
        return f"; did you mean {near[0]}?" if near else ""
