"""``penstock drain``, ``penstock flush-cache`` and ``penstock settings``: commands that change a running service."""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from tqdm import tqdm

import penstock.v1 as pb
from penstock.clients.cli.admin.client import AdminClient, call_admin
from penstock.clients.cli.as_dict import as_dict, duration_of
from penstock.clients.cli.command_parser import CommandParser, nearest
from penstock.clients.cli.options import ConnectionOptions, add_admin_flags, admin_connection
from penstock.clients.errors import PenstockError, RequestFailed, shown

_PREFIX = "SCHEDULING_POLICY_"
_POLICIES = {name.removeprefix(_PREFIX).lower(): number for name, number in pb.SchedulingPolicy.items() if number != 0}
_LIMITS: Mapping[str, str] = {
    "max_num_seqs": "maximum number of rows in a step",
    "max_num_batched_tokens": "maximum number of tokens in a step",
    "max_queued_requests": "maximum number of requests in the queue",
    "max_queued_tokens": "maximum number of prompt tokens in the queue",
}
_CAPS = ("max_prompt_tokens", "max_tokens", "max_live_requests", "requests_per_second", "tokens_per_minute")
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in ("policy", "default_tenant", *_LIMITS)} | {
    "target_itl": "--target-itl", "tenants": "--tenant", "forget_tenants": "--forget-tenant",
}  # fmt: skip
"""The flag for each field of an update."""
_RESETTABLE = {name.replace("_", "-"): name for name in ("policy", *_LIMITS, "target_itl", "default_tenant", "tenants")}
"""The settings that ``--reset`` takes."""
_FIELD_IN_TEXT = re.compile(rf"(?<![\w-])({'|'.join(name for name in _FLAGS if '_' in name)})\b")
_FIELD_PATH = re.compile(r"(\w*)(?:\[(\d+)\])?\.?(.*)", re.DOTALL)

_DRAIN_EPILOG = """\
examples:
  penstock drain --wait         before stopping the service: wait until the last request has ended
  penstock drain --resume       accept new requests again
"""
_FLUSH_EPILOG = """\
examples:
  penstock flush-cache          the next requests compute their whole prompts
"""
_SETTINGS_EPILOG = """\
examples:
  penstock settings                                        show the current settings
  penstock settings --policy fair --target-itl 20
  penstock settings --tenant acme weight=2,max-live-requests=8 --forget-tenant zenith
  penstock settings --max-queued-requests 100 --json
  penstock settings --reset max-num-seqs                   back to the value of penstock serve
  penstock settings --max-num-seqs 64 --etag 3f0c...       only if the settings have not changed since

Settings of a tenant that are not given get their defaults: a weight of 1, no caps and no rates. Either all changes are
made or none, and no request is lost. Changes last until the service stops; to keep one, pass it to penstock serve too.
"""


def drain(argv: list[str] | None = None) -> int:
    """Runs ``penstock drain`` and returns its exit status."""
    arguments = drain_parser().parse_args(argv)
    service = admin_connection(arguments)
    if arguments.resume:
        call_admin(service, "Resume", pb.ResumeRequest())
        print("new requests are accepted")
    else:
        asyncio.run(_drain(service, arguments.wait))
    return 0


def drain_parser() -> argparse.ArgumentParser:
    """Defines the flags of ``penstock drain``."""
    parser = _parser("drain", "Makes the service refuse new requests and finish the running ones.", _DRAIN_EPILOG)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--resume", action="store_true", help="accept new requests again")
    what.add_argument("--wait", action="store_true", help="wait until no request is left (default: return at once)")
    return parser


def flush_cache(argv: list[str] | None = None) -> int:
    """Runs ``penstock flush-cache`` and returns its exit status."""
    arguments = flush_cache_parser().parse_args(argv)
    answer = call_admin(admin_connection(arguments), "FlushCache", pb.FlushCacheRequest())
    print(f"{answer.flushed_blocks:,} blocks dropped")
    return 0


def flush_cache_parser() -> argparse.ArgumentParser:
    """Defines the flags of ``penstock flush-cache``."""
    return _parser("flush-cache", "Drops every cached block that no request holds.", _FLUSH_EPILOG)


def settings(argv: list[str] | None = None) -> int:
    """Runs ``penstock settings`` and returns its exit status."""
    arguments = settings_parser().parse_args(argv)
    request = _update(arguments)
    service = admin_connection(arguments)
    if request.ByteSize():
        try:
            answer = call_admin(service, "UpdateSettings", request)
        except RequestFailed as failure:
            raise _in_flags(failure, arguments) from None
    else:
        answer = call_admin(service, "GetSettings", pb.GetSettingsRequest())
    plain = _plain(answer.settings)
    print(json.dumps(plain, indent=2) if arguments.json else _as_table(plain))
    return 0


async def _drain(service: ConnectionOptions, wait: bool) -> None:
    async with AdminClient.opened(service) as client:
        live: int = (await client.call("Drain", pb.DrainRequest())).live_requests
        print(f"new requests are refused; {live:,} {'is' if live == 1 else 'are'} still running", flush=True)
        if wait:
            await _wait(client, live)
            print("no request is left")


async def _wait(client: AdminClient, live: int) -> None:
    """Waits until no request is live, with a progress bar on a terminal. Raises PenstockError if the service is
    resumed."""
    progress = tqdm(total=live, unit=" requests", leave=False, disable=not sys.stderr.isatty(), file=sys.stderr)
    with progress:
        async with aclosing(client.watch_stats(interval_s=0.25)) as answers:
            async for stats in answers:
                progress.update(live - stats.live_requests - progress.n)
                if not stats.live_requests:
                    return
                if stats.state == pb.SERVICE_STATE_SERVING:
                    raise PenstockError("the service accepts requests again: it was resumed")
    raise PenstockError("the service stopped before the last request ended")


def settings_parser() -> argparse.ArgumentParser:
    """Defines the flags of ``penstock settings``."""
    parser = _parser("settings", "Shows or changes the settings of a running service.", _SETTINGS_EPILOG)
    changes = parser.add_argument_group("changes (default: none; the settings are printed)")
    changes.add_argument("--policy", choices=list(_POLICIES), help="which requests run first")
    changes.add_argument(
        "--target-itl",
        dest="target_itl",
        type=float,
        metavar="MS",
        help="target time between a stream's tokens, met by computing prompts in chunks; 0: the service decides",
    )
    for name, explanation in _LIMITS.items():
        changes.add_argument(_FLAGS[name], type=int, metavar="N", help=explanation)
    changes.add_argument(
        "--tenant",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "KEY=VALUE,..."),
        help=f"all settings of a tenant: weight, {', '.join(map(_key, _CAPS))}",
    )
    changes.add_argument("--default-tenant", metavar="KEY=VALUE,...", help="the settings of all other tenants")
    changes.add_argument(
        "--forget-tenant", action="append", default=[], metavar="NAME", help="reset this tenant to the default settings"
    )
    changes.add_argument(
        "--reset",
        action="append",
        default=[],
        choices=list(_RESETTABLE),
        help="reset this setting to the value that penstock serve was started with; may be repeated",
    )
    changes.add_argument(
        "--etag", default="", metavar="ETAG", help="change nothing unless the settings still have this etag"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: a table)")
    return parser


def _update(arguments: argparse.Namespace) -> pb.UpdateSettingsRequest:
    policy = _POLICIES.get(arguments.policy, pb.SCHEDULING_POLICY_UNSPECIFIED)
    settings = pb.Settings(policy=policy)
    for name in _LIMITS:
        if (number := getattr(arguments, name)) is not None:
            _set(settings, name, number, _FLAGS[name])
    if arguments.target_itl is not None:
        try:
            settings.target_itl.CopyFrom(duration_of(arguments.target_itl / 1000))
        except (OverflowError, ValueError):
            raise PenstockError(f"--target-itl: must be 0 to 60,000 ms; it is {arguments.target_itl:g}") from None
    settings.tenants.extend(_tenant(f"--tenant {name}", name, written) for name, written in arguments.tenant)
    if arguments.default_tenant is not None:
        settings.default_tenant.CopyFrom(_tenant("--default-tenant", "", arguments.default_tenant))
    changed, reset = [field.name for field, _ in settings.ListFields()], [_RESETTABLE[key] for key in arguments.reset]
    if both := sorted(set(changed) & set(reset)):
        raise PenstockError(f"{_FLAGS[both[0]]} and --reset are both given for it; give one of them")
    request = pb.UpdateSettingsRequest(forget_tenants=arguments.forget_tenant)
    if changed or reset or arguments.forget_tenant:
        settings.etag = arguments.etag
        request.settings.CopyFrom(settings)
        request.update_mask.paths.extend(dict.fromkeys(changed + reset))
    elif arguments.etag:
        raise PenstockError("--etag: there is nothing to change; give a change too")
    return request


def _tenant(flag: str, name: str, written: str) -> pb.TenantSettings:
    """Parses a tenant's settings, such as ``weight=2,max-live-requests=8``. Raises PenstockError."""
    readers: dict[str, Callable[[str], float]] = {"weight": float, **dict.fromkeys(_CAPS, int)}
    readers["requests_per_second"] = float
    message = pb.TenantSettings(tenant=name)
    for part in filter(None, written.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        field = key.replace("-", "_")
        if field not in readers:
            near = nearest(key, map(_key, readers))
            hint = f"did you mean {near}?" if near else f"use one of {', '.join(map(_key, readers))}, such as weight=2"
            raise PenstockError(f"{flag}: {shown(key)} is not a setting of a tenant; {hint}")
        try:
            number = readers[field](value)
        except ValueError:
            kind = "a number" if readers[field] is float else "a whole number"
            raise PenstockError(f"{flag}: {key} must be {kind}; it is {shown(value)}") from None
        _set(message, field, number, f"{flag}: {key}")
    return message


def _set(message: Any, field: str, number: float, named: str) -> None:
    """Sets a field. Raises PenstockError for a number out of its range; the service checks the rest."""
    try:
        setattr(message, field, number)
    except ValueError:
        remedy = "it must be at least 1" if number < 1 else "give a smaller one"
        raise PenstockError(f"{named}: {shown(number)} is out of range; {remedy}") from None


def _in_flags(failure: RequestFailed, arguments: argparse.Namespace) -> PenstockError:
    """Returns the failure of an update with the contract's field names replaced by those of flags."""
    if not failure.violations:
        return failure
    path, description = failure.violations[0]
    field = path.removeprefix("settings.")
    problem = _FIELD_IN_TEXT.sub(lambda name: _FLAGS[name[0]], description.removeprefix(f"{path}: "))
    name, index, inner = _FIELD_PATH.fullmatch(field).groups()  # type: ignore[union-attr]  # it matches any text
    flag = _FLAGS.get(name, name)
    if index:
        given = arguments.tenant[int(index)][0] if name == "tenants" else arguments.forget_tenant[int(index)]
        flag = f"{flag} {given or repr(given)}"
    inner = "" if inner in ("", "tenant") else f" {_key(inner)}:"
    return PenstockError(f"{flag}:{inner} {problem}")


def _plain(settings: pb.Settings) -> dict[str, Any]:
    """Converts settings for JSON: tenants by name, and None for what has no limit."""
    plain = as_dict(settings)
    plain["target_itl"] = plain["target_itl"] or None
    del plain["default_tenant"]["tenant"]
    plain["tenants"] = {tenant.pop("tenant"): tenant for tenant in plain["tenants"]}
    return plain


def _as_table(plain: dict[str, Any]) -> str:
    target_itl = plain["target_itl"]
    rows = [
        ("policy", plain["policy"]),
        *((_key(name), f"{plain[name]:,}") for name in _LIMITS),
        ("target-itl", f"{1000 * target_itl:g} ms" if target_itl else "auto"),
    ]
    lines = [f"{name:22}  {value}" for name, value in [*rows, ("etag", plain["etag"])]]
    tenants = {"(all others)": plain["default_tenant"], **plain["tenants"]}
    width = max(len(name) for name in ("tenant", *tenants))
    lines += ["", "  ".join([f"{'tenant':{width}}", "weight", *map(_key, _CAPS)])]
    for name, tenant in tenants.items():
        cells = [f"{'none' if tenant[cap] is None else f'{tenant[cap]:,}':>{len(cap)}}" for cap in _CAPS]
        lines.append("  ".join([f"{name:{width}}", f"{tenant['weight']:6g}", *cells]))
    return "\n".join(lines)


def _key(name: str) -> str:
    return name.replace("_", "-")


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser = CommandParser(name, description, epilog)
    add_admin_flags(parser)
    return parser
