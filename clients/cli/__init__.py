"""The ``penstock`` command and its subcommands for callers. Servers are found by name, at run time."""
