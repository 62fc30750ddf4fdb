"""Policies by name: ours, those of installed packages, and MODULE:NAME where the user has allowed it.

A name may be somebody else's: a pipeline's file, a file of limits, a Prefect block, a parameter of a flow holds it.
So a name alone imports nothing but what is installed and offers itself by an entry point of the group ``GROUP``;
MODULE:NAME is imported only where ``allowed`` has it, which the command line fills with what was typed there.
"""

import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_origin, get_type_hints

from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.catalogue import BY_NAME, policy_entry
from ebbflow.planners.scheduling.live import DEFAULT, live_policy

GROUP = "ebbflow.policies"
"""Entry points by which an installed package offers policies: a name, and the class or factory that makes it."""
OPTION = "--allow-policy"
_WRITTEN = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+(\.(?!\d)\w+)*")


def policy_of(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    lease_s: float | None = None,
    allowed: Collection[str] = (),
) -> Policy:
    """Return the policy called ``name``, made with ``options``; empty: the default one.

    What is imported must be a policy, its class, or a function whose return annotation is one: that is looked at
    before anything is called.

    Args:
        name: one of ours, one that an installed package offers, or ``MODULE:NAME`` of ``allowed``.
        options: of the policy.
        lease_s: for policies of ours that give leases and are not told otherwise.
        allowed: what may be imported, as ``MODULE:NAME``.

    Raises ``OptionError`` for a name, module or option that there is not, for what may not be imported, and for what
    is no policy.
    """
    found = _found(name, allowed)
    if found is None:
        return live_policy(name or DEFAULT, options, lease_s=lease_s)
    return _made(name, _imported(found), dict(options or {}))


def check_policy(
    name: str, options: Mapping[str, Any] | None = None, *, allowed: Collection[str] | None = None
) -> None:
    """Check what can be known of a policy without importing anything of others.

    ``allowed``: what may be imported; ``None``: whoever asks does not know that yet.

    Raises ``OptionError``.
    """
    if _found(name, allowed) is None:
        live_policy(name or DEFAULT, options)


def checked_names(written: Collection[str]) -> tuple[str, ...]:
    """Return what the user allows to be imported, each as ``MODULE:NAME``. Raises ``OptionError``."""
    for one in written:
        if not _WRITTEN.fullmatch(one):
            raise OptionError(f"{OPTION} must be MODULE:NAME, such as mymodule:MyPolicy; got {one!r}")
    return tuple(written)


def _found(name: str, allowed: Collection[str] | None) -> EntryPoint | None:
    """Return what is to be imported; ``None``: the policy is ours."""
    if not name or name.strip().lower() in BY_NAME:
        return None
    if ":" not in name:
        return _offered(name)
    if not _WRITTEN.fullmatch(name):
        raise OptionError(f"policy must be a name or MODULE:NAME, such as mymodule:MyPolicy; got {name!r}")
    if allowed is not None and name not in allowed:
        raise OptionError(
            f"policy {name} is code that would be imported: what a file, a block or a parameter names is imported "
            f"only if the operator who starts the run allows it ({OPTION} {name}; allow_policies in a"
            f" deployment), or as a "
            f"name that an installed package offers (entry points {GROUP}; here: {', '.join(_names()) or 'none'})"
        )
    return EntryPoint(name, name, GROUP)


def _offered(name: str) -> EntryPoint:
    offered = {one.value: one for one in entry_points(group=GROUP, name=name)}
    if len(offered) > 1:
        raise OptionError(
            f"policy {name!r} is offered by several installed packages ({', '.join(sorted(offered))}); uninstall "
            f"one, or name the one you mean as MODULE:NAME with {OPTION}"
        )
    if not offered:
        policy_entry(name)  # says which is the nearest
    return next(iter(offered.values()))


def _names() -> list[str]:
    return sorted({one.name for one in entry_points(group=GROUP)})


def _imported(point: EntryPoint) -> object:
    try:
        with _present_folder():
            return point.load()
    except (Exception, SystemExit) as error:  # whatever their module does
        raise OptionError(
            f"the policy {point.value} cannot be imported: {type(error).__name__}: {error}; write MODULE:NAME of a "
            "module on the Python path or in the present directory"
        ) from error


@contextmanager
def _present_folder() -> Iterator[None]:
    """Let modules be found in the present directory, behind all that is installed: none there hides one of those."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.reverse()
            sys.path.remove(here)  # the last one, which is ours
            sys.path.reverse()


def _made(name: str, found: Any, options: Mapping[str, Any]) -> Policy:
    if not _makes_policies(found):
        if not _is_policy(found):
            raise OptionError(
                f"{name} is no policy and was not called: it must be a class with name and decide(view, memory, rng) "
                "(ebbflow.planners.model.scheduling.Policy), a value of one, or a function whose return annotation "
                "is such a class"
            )
        if options:
            raise OptionError(f"{name} is a policy already and has no options; got {dict(options)}")
        return _policy(found)
    try:
        inspect.signature(found).bind(**options)
    except (TypeError, ValueError) as error:
        raise OptionError(f"the policy {name} cannot be made with {dict(options)}: {error}") from error
    try:
        made = found(**options)
    except EbbflowError:
        raise
    except Exception as error:  # their code
        raise OptionError(
            f"the policy {name} cannot be made with {dict(options)}: {type(error).__name__}: {error}"
        ) from error
    if not _is_policy(made):
        raise OptionError(
            f"{name} has made no policy but {type(made).__name__}: it must have a name and decide(view, memory, rng) "
            "(ebbflow.planners.model.scheduling.Policy)"
        )
    return _policy(made)


def _makes_policies(found: object) -> bool:
    """Tell whether calling ``found`` makes a policy, as far as that can be known without a call."""
    if inspect.isclass(found):
        return callable(getattr(found, "decide", None))
    if not inspect.isfunction(found):
        return False
    try:
        promised = get_type_hints(found).get("return")
    except Exception:  # an annotation that names nothing
        return False
    promised = get_origin(promised) or promised
    return inspect.isclass(promised) and callable(getattr(promised, "decide", None))


def _is_policy(made: object) -> bool:
    named = isinstance(getattr(made, "name", None), str)
    return named and not inspect.isclass(made) and callable(getattr(made, "decide", None))


def _policy(made: Any) -> Policy:
    result: Policy = made
    return result
