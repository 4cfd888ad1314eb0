"""The installed distribution: its name on a package index, its version, and the command that installs an extra."""

import importlib.metadata

NAME = "penstock-llm"


def installed_version() -> str:
    """Returns the version of the installed penstock."""
    return importlib.metadata.version(NAME)


def install_command(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install '{NAME}[{extra}]'"
