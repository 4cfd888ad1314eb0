"""The settings that can change while the service runs: converts between the engine's configuration and the protos.

A change replaces the whole configuration: it applies from the next plan on, or is refused and changes nothing.
"""

from collections.abc import Container, Mapping
from dataclasses import asdict, replace
from typing import Any

from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.policy import Policy
from penstock.service.config.limits import MAX_NAMED_TENANTS
from penstock.service.errors import invalid

_POLICIES = {policy: pb.SchedulingPolicy.Value(f"SCHEDULING_POLICY_{policy.name}") for policy in Policy}
_POLICY_OF = {number: policy for policy, number in _POLICIES.items()}
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens")


def get_settings(engine: Engine) -> pb.Settings:
    """Returns the current settings of a started engine."""
    config = _effective_config(engine)
    return pb.Settings(
        policy=_POLICIES[config.policy],
        **{name: getattr(config, name) for name in _LIMITS},
        target_itl_ms=round(1000 * (config.target_itl_s or 0.0), 6),
        default_tenant=pb.TenantSettings(**asdict(config.default_tenant)),
        tenants=[pb.TenantSettings(tenant=name, **asdict(limits)) for name, limits in sorted(config.tenants.items())],
    )


def update_settings(engine: Engine, request: pb.UpdateSettingsRequest) -> pb.Settings:
    """Makes all changes and returns the new settings. Raises ServiceError INVALID_FIELD and changes nothing if one is
    invalid. The fields of ``request`` have been validated one by one."""
    before, given = _effective_config(engine), _given(request)
    changes: dict[str, Any] = {name: given[name] for name in _LIMITS if name in given}
    if request.policy:
        changes["policy"] = _POLICY_OF[request.policy]
    if "target_itl_ms" in given:
        changes["target_itl_s"] = request.target_itl_ms / 1000 or None
    if "default_tenant" in given:
        if request.default_tenant.tenant:
            raise invalid("default_tenant.tenant", "must be empty; put the settings of a single tenant into tenants")
        changes["default_tenant"] = _tenant_limits(request.default_tenant)
    after = replace(before, **changes, tenants=_tenants(before.tenants, request))
    try:
        after.check_fits(engine.facts, before)
        _check_rows(after, given, engine.facts.max_num_batched_tokens)
        engine.reconfigure(after)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")  # the text begins with the name of the field as in the protos
        raise invalid(name, problem) from None
    return get_settings(engine)


def _effective_config(engine: Engine) -> SchedulerConfig:
    """Returns the configuration with the worker's effective limits, which may be lower than those configured."""
    config, facts = engine.config, engine.facts
    return replace(config, max_num_seqs=config.max_rows(facts), max_num_batched_tokens=config.token_budget(facts))


def _check_rows(config: SchedulerConfig, given: Container[str], most_tokens: int) -> None:
    """Raises ServiceError if a step would have fewer tokens than rows. The error names the limit that is in ``given``,
    because the other one was valid before. ``most_tokens`` is the maximum number of tokens in the worker's steps."""
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if tokens >= rows:
        return
    if "max_num_batched_tokens" in given:
        lower = "lower max_num_seqs" if "max_num_seqs" in given else "lower max_num_seqs too"
        raise invalid(
            "max_num_batched_tokens",
            f"must be at least max_num_seqs, {rows:,}, so that each row gets a token; it is {tokens:,}; raise it, or "
            f"{lower}",
        )
    or_more = ", or raise max_num_batched_tokens too" if rows <= most_tokens else ""
    raise invalid(
        "max_num_seqs",
        f"must be at most max_num_batched_tokens, {tokens:,}, so that each row gets a token; it is {rows:,}; lower it"
        f"{or_more}",
    )


def _given(message: Message) -> dict[str, Any]:
    """Returns the set fields by name."""
    return {descriptor.name: value for descriptor, value in message.ListFields()}


def _tenant_limits(message: pb.TenantSettings) -> TenantLimits:
    return TenantLimits(**{name: value for name, value in _given(message).items() if name != "tenant"})


def _tenants(before: Mapping[str, TenantLimits], request: pb.UpdateSettingsRequest) -> dict[str, TenantLimits]:
    """Returns the new limits of named tenants. Raises ServiceError."""
    forgotten, seen = set(request.forget_tenants), set[str]()
    after = {name: limits for name, limits in before.items() if name not in forgotten}
    for index, message in enumerate(request.tenants):
        field = f"tenants[{index}].tenant"
        if not message.tenant:
            raise invalid(field, "is required; put the settings of all tenants that are not named into default_tenant")
        if message.tenant in forgotten:
            raise invalid(field, "the tenant is also in forget_tenants; name it in only one of the two")
        if message.tenant in seen:
            raise invalid(field, "the tenant is already in this request; name it once")
        seen.add(message.tenant)
        after[message.tenant] = _tenant_limits(message)
    if len(after) > MAX_NAMED_TENANTS:
        raise invalid(
            "tenants", f"at most {MAX_NAMED_TENANTS:,} tenants may have settings; remove some with forget_tenants"
        )
    return after
