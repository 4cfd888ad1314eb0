"""How the terminal tools read their arguments."""

import argparse
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
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; {self.prog} --help lists the flags\n")
