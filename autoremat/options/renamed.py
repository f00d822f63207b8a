"""Translates option names and values of earlier versions, which stay accepted for one release."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from autoremat.basics.checks import refused
from autoremat.basics.errors import OptionsError
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.policies import Selective

NAMES = {"inner": "compiler", "reserve": "auto_headroom", "on_unplannable": "on_planning_error"}
VALUES = {("on_planning_error", "warn"): "fallback", ("cost_model", "profile"): "calibrated"}
MODULES = "recompute_modules"


def renamed(options: Mapping[str, Any], configured_policy: object = None) -> dict[str, Any]:
    """Returns ``options`` under their present names, with a ``DeprecationWarning`` for each old name or value.

    ``configured_policy`` is the policy that ``configure`` set; ``recompute_modules`` may refer to it. Raises ``OptionsError``
    for an option that is given under both of its names.
    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = NAMES.get(key, key)
        if name in found or (name != key and name in options):
            raise OptionsError(f"the option {name!r} is given twice: also under its old name")
        if name != key:
            _warn(f"the option {key!r}", f"{name!r}")
        new = VALUES.get((name, value)) if isinstance(value, str) else None
        if new is not None:
            _warn(f"{name}={value!r}", f"{name}={new!r}")
        found[name] = value if new is None else new
    return _with_modules(found, configured_policy) if found.get(MODULES) is not None else found


def _with_modules(options: dict[str, Any], configured_policy: object) -> dict[str, Any]:
    """Returns ``options`` with ``recompute_modules`` merged into the policy.

    Raises ``OptionsError`` if the policy is not selective.
    """
    modules = options.pop(MODULES)
    policy = options.get("policy", configured_policy)
    if isinstance(modules, str) or not isinstance(modules, Collection) or not all(isinstance(one, str) for one in modules):
        raise refused(MODULES, modules, 'a list of globs of module paths ("layers.*.mlp")')
    if modules and not isinstance(policies.parse(policy), Selective):
        raise OptionsError(f'{MODULES}={modules!r} belongs to policy="selective", and the policy is {policy!r}')
    if modules:
        _warn(f"the option {MODULES!r}", f'policy="selective:{",".join(modules)}"')
        options["policy"] = Selective(tuple(dict.fromkeys(modules)))
    return options


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated and will be removed in the next release; use {new}", DeprecationWarning, stacklevel=4)
