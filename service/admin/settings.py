"""The settings that can change while the service runs: converts between the engine's configuration and the protos.

A change replaces the whole configuration: it applies from the next plan on, or is refused and changes nothing.
"""

import hashlib
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, replace
from typing import Any

from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.policy import Policy
from penstock.service.config.durations import to_duration, to_seconds
from penstock.service.config.limits import MAX_NAMED_TENANTS, SETTINGS
from penstock.service.errors import Reason, ServiceError, invalid

_POLICIES = {policy: pb.SchedulingPolicy.Value(f"SCHEDULING_POLICY_{policy.name}") for policy in Policy}
_POLICY_OF = {number: policy for policy, number in _POLICIES.items()}
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens")
_NAMES_IN_CONFIG = {"target_itl": "target_itl_s"}
"""The names of settings in the engine's configuration, where they differ."""


class RunningSettings:
    """The settings of a started engine."""

    def __init__(self, engine: Engine, configured: Callable[[], SchedulerConfig]) -> None:
        """``configured`` returns the configuration by the command line, which reset settings get again."""
        self._engine = engine
        self._configured = configured

    def get(self) -> pb.Settings:
        """Returns the current settings, with their etag."""
        config = self._effective(self._engine.config)
        settings = pb.Settings(
            policy=_POLICIES[config.policy],
            **{name: getattr(config, name) for name in _LIMITS},
            target_itl=to_duration(config.target_itl_s or 0.0),
            default_tenant=pb.TenantSettings(**asdict(config.default_tenant)),
            tenants=[
                pb.TenantSettings(tenant=name, **asdict(limits)) for name, limits in sorted(config.tenants.items())
            ],
        )
        settings.etag = hashlib.sha256(settings.SerializeToString(deterministic=True)).hexdigest()[:32]
        return settings

    def update(self, request: pb.UpdateSettingsRequest) -> pb.Settings:
        """Makes all changes and returns the new settings. Raises ServiceError and changes nothing: SETTINGS_CHANGED for
        the etag of earlier settings, INVALID_FIELD for an invalid value. The fields of ``request`` have been validated
        one by one."""
        wanted, engine = request.settings, self._engine
        if wanted.etag and wanted.etag != self.get().etag:
            raise ServiceError(Reason.SETTINGS_CHANGED, field="settings.etag")
        before, names = self._effective(engine.config), _named(request)
        given = _given(wanted, names)
        changes: dict[str, Any] = {name: given[name] for name in _LIMITS if name in given}
        if "policy" in given:
            changes["policy"] = _POLICY_OF[wanted.policy]
        if "target_itl" in given:
            changes["target_itl_s"] = to_seconds(wanted.target_itl) or None
        if "default_tenant" in given:
            if wanted.default_tenant.tenant:
                raise invalid(
                    "settings.default_tenant.tenant",
                    "must be empty; put the settings of a single tenant into tenants",
                )
            changes["default_tenant"] = _tenant_limits(wanted.default_tenant)
        changes |= self._reset([name for name in names if name not in given])
        tenants = changes.pop("tenants", before.tenants)
        after = replace(before, **changes, tenants=_tenants(tenants, request, "tenants" in given))
        self._replace(before, after, names)
        return self.get()

    def _replace(self, before: SchedulerConfig, after: SchedulerConfig, names: Container[str]) -> None:
        """Replaces the engine's configuration, in which ``names`` change. Raises ServiceError."""
        engine = self._engine
        try:
            after.check_fits(engine.facts, before)
            _check_rows(after, names, engine.facts.max_num_batched_tokens)
            engine.reconfigure(after)
        except ValueError as error:
            name, _, problem = str(error).partition(" ")  # the text begins with the name of the field as in the protos
            raise invalid(f"settings.{name}", problem) from None

    def _reset(self, names: list[str]) -> dict[str, Any]:
        """Returns the values of these settings by the command line."""
        configured = self._effective(self._configured())
        return {name: getattr(configured, name) for name in (_NAMES_IN_CONFIG.get(name, name) for name in names)}

    def _effective(self, config: SchedulerConfig) -> SchedulerConfig:
        """Returns the configuration with the worker's effective limits, which may be lower than those configured."""
        facts = self._engine.facts
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
            "settings.max_num_batched_tokens",
            f"must be at least max_num_seqs, {rows:,}, so that each row gets a token; it is {tokens:,}; raise it, or "
            f"{lower}",
        )
    or_more = ", or raise max_num_batched_tokens too" if rows <= most_tokens else ""
    raise invalid(
        "settings.max_num_seqs",
        f"must be at most max_num_batched_tokens, {tokens:,}, so that each row gets a token; it is {rows:,}; lower it"
        f"{or_more}",
    )


def _named(request: pb.UpdateSettingsRequest) -> tuple[str, ...]:
    """Returns the names of the settings that a request changes."""
    paths = request.update_mask.paths
    if "*" in paths:
        return SETTINGS
    return tuple(name for name in SETTINGS if name in (paths or _given(request.settings, SETTINGS)))


def _given(message: Message, names: Container[str]) -> dict[str, Any]:
    """Returns those fields of ``names`` that are set, by name."""
    return {descriptor.name: value for descriptor, value in message.ListFields() if descriptor.name in names}


def _tenant_limits(message: pb.TenantSettings) -> TenantLimits:
    return TenantLimits(**{field.name: value for field, value in message.ListFields() if field.name != "tenant"})


def _tenants(
    before: Mapping[str, TenantLimits], request: pb.UpdateSettingsRequest, may_change: bool
) -> dict[str, TenantLimits]:
    """Returns the new limits of named tenants. Those in the settings of ``request`` apply if ``may_change``. Raises
    ServiceError."""
    forgotten, seen = set(request.forget_tenants), set[str]()
    after = {name: limits for name, limits in before.items() if name not in forgotten}
    for index, message in enumerate(request.settings.tenants if may_change else ()):
        field = f"settings.tenants[{index}].tenant"
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
            "settings.tenants",
            f"at most {MAX_NAMED_TENANTS:,} tenants may have settings; remove some with forget_tenants",
        )
    return after
