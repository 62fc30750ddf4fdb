"""The policies of ``planners.scheduling`` for a live cluster, by name and options."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from math import inf, isfinite, isnan
from typing import Any, cast

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.catalogue import ENTRIES, Entry, Setting, policy_entry
from ebbflow.planners.scheduling.gangs.gittins import ServiceDistribution
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias

DEFAULT = "rho-bounded"

Option = int | float | str | bool | None
_LIVE = Setting(
    "durations",
    types=("any",),  # no GPU type is known to be faster than another
    reset_s=0.0,  # who arrives pending: next round, not for the next but ten
)
_OWN = ("name", "elastic", "before")  # what makes a policy itself


def live_policies() -> tuple[Entry, ...]:
    """Return all policies that a live cluster can be run by, as the simulator lists them."""
    return ENTRIES


def live_policy(
    name: str = DEFAULT,
    options: Mapping[str, Any] | None = None,
    *,
    lease_s: float | None = None,
    services: Sequence[float] = (),
) -> Policy:
    """Return the policy called ``name``.

    ``options`` are its own, such as ``rho`` or ``knob``; ``live_options`` lists them. ``lease_s`` is how long its
    leases last where it gives leases and ``options`` do not say. ``services`` are GPU-seconds of apps that have
    ended, which Gittins' index is computed from.

    Raises ``OptionError`` for an unknown name or option, or a value outside its rule.

    >>> live_policy("themis", {"knob": 0.5}).knob
    0.5
    """
    entry, given = policy_entry(name), dict(options or {})
    known = live_options(name)
    for key, value in given.items():
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise OptionError(f"policy {entry.name} has no option {key!r}; it has {listed}")
        given[key] = _as(known[key], value, f"option {key} of policy {entry.name}")
    if entry.name in ("tiresias", "tiresias-g"):
        return _tiresias(entry.name, given, services)
    made = entry.make(_LIVE)
    for key in ("lease_s", "round_s"):
        if key in known and key not in given and lease_s is not None and isfinite(known[key]):
            given[key] = lease_s
    return _replaced(made, given)


def live_options(name: str) -> dict[str, Any]:
    """Return the options of a policy with their values where they are not given. Raises ``OptionError``."""
    entry = policy_entry(name)
    if entry.name in ("tiresias", "tiresias-g"):
        return {
            key: one.default
            for key, one in signature(Tiresias).parameters.items()
            if isinstance(one.default, int | float | str) and key != "name"
        }
    made: Any = entry.make(_LIVE)
    if not is_dataclass(made):
        return {}
    found = {}
    for one in fields(made):
        value = getattr(made, one.name)
        if one.init and one.name not in _OWN and isinstance(value, int | float | str | None):
            found[one.name] = value
    return found


def _tiresias(name: str, given: dict[str, Any], services: Sequence[float]) -> Policy:
    if name == "tiresias":
        return Tiresias(**given)
    past = [one for one in services if one > 0 and isfinite(one)]
    if not past:
        raise OptionError(
            "tiresias-g needs the GPU-seconds of apps that have ended; there are none yet: use tiresias"
        )
    return Tiresias(distribution=ServiceDistribution(past), name=name, **given)


def _replaced(made: Policy, given: Mapping[str, Any]) -> Policy:
    if not given:
        return made
    return cast(Policy, replace(cast(Any, made), **given))


def _as(default: Any, value: Any, where: str) -> Option:
    """Return ``value`` as the kind of ``default``, which may be written as text."""
    kind: type = float if default is None or isinstance(default, float) else type(default)
    if value is None and default is None:
        return None
    if kind is bool or isinstance(value, bool):
        if isinstance(value, bool) and kind is bool:
            return value
        raise OptionError(f"{where} must be {kind.__name__}; got {value!r}")
    if kind is str:
        if isinstance(value, str):
            return value
        raise OptionError(f"{where} must be text; got {value!r}")
    try:
        number = kind(value)
    except (TypeError, ValueError) as exc:
        raise OptionError(f"{where} must be a number; got {value!r}") from exc
    if kind is int and number != float(value):
        raise OptionError(f"{where} must be a whole number; got {value!r}")
    if isnan(number) or number == -inf:
        raise OptionError(f"{where} must be a number; got {value!r}")
    return cast(Option, number)
