"""``penstock adapters``: lists, loads and unloads the LoRA adapters of a running service."""

import argparse
import json

import penstock.v1 as pb
from penstock.clients.cli.admin.client import call_admin
from penstock.clients.cli.as_dict import as_dict
from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import add_admin_flags, admin_connection
from penstock.clients.errors import PenstockError, shown

_LOAD_TIMEOUT_S = 300.0
"""The deadline of a load, whose files may be on a slow disk."""
_EPILOG = """\
examples:
  penstock adapters                              show the adapters
  penstock adapters --load support /srv/support  a name for requests, and a directory on the service's host
  penstock adapters --unload support             running requests finish
"""


def main(argv: list[str] | None = None) -> int:
    """Runs ``penstock adapters`` and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    service = admin_connection(arguments)
    if arguments.load is not None:
        name, path = arguments.load
        if not path.startswith("/"):
            raise PenstockError(f"--load: {shown(path)} must be an absolute path on the service's host")
        request = pb.LoadAdapterRequest(name=name, path=path)
        adapter = call_admin(service, "LoadAdapter", request, _LOAD_TIMEOUT_S).adapter
        print(f"{adapter.name} is loaded, rank {adapter.rank}")
    elif arguments.unload is not None:
        call_admin(service, "UnloadAdapter", pb.UnloadAdapterRequest(name=arguments.unload))
        print(f"{arguments.unload} is unloaded")
    else:
        adapters = call_admin(service, "ListAdapters", pb.ListAdaptersRequest()).adapters
        print(json.dumps([as_dict(adapter) for adapter in adapters], indent=2) if arguments.json else _table(adapters))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Defines the flags of ``penstock adapters``."""
    parser = CommandParser("adapters", "Lists, loads and unloads the LoRA adapters of a running service.", _EPILOG)
    add_admin_flags(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--load", nargs=2, metavar=("NAME", "PATH"), help="load an adapter (default: the list is printed)"
    )
    what.add_argument("--unload", metavar="NAME", help="unload an adapter")
    parser.add_argument("--json", action="store_true", help="print the list as JSON (default: a table)")
    return parser


def _table(adapters: "list[pb.Adapter]") -> str:
    if not adapters:
        return "no adapters are loaded"
    width = max(len(adapter.name) for adapter in adapters)
    lines = [f"{'adapter':{max(width, 7)}}  rank  slot  rows  path"]
    for adapter in adapters:
        slot = adapter.slot or "none"
        lines.append(
            f"{adapter.name:{max(width, 7)}}  {adapter.rank:4}  {slot:>4}  {adapter.running_rows:4}  {adapter.path}"
        )
    return "\n".join(lines)
