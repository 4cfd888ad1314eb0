"""The ``penstock`` command and its subcommands for callers. Server commands are imported by name at run time."""
