"""Pages that are made from the code and kept in the repository: run it after a change of an option or a key.

``docs/configuration.md`` comes from the schema of pipeline files and from what the configuration file's reader accepts,
``docs/reference/cli.md`` from the command line. ``tests/docs/test_site.py`` holds both to the code.

``python scripts/reference_pages.py`` writes them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_MARKUP = re.compile(r"\[(/?)b\]")
_KNOWN = re.compile(r"known are ([\w, ]+)")

INTRODUCTION = """# Configuration

Two files configure Ebbflow. The *configuration file* (TOML, `ebbflow.toml`) belongs to the operator of a cluster: how the
capacity loop decides, and what no decision may exceed. A *pipeline file* (YAML) belongs to a team: steps, and what they need.
`ebbflow init` writes an example of each. This page is made from the code (`python scripts/reference_pages.py`); a key that is
not on it is rejected, with the nearest one that is.

Durations are `90s`, `5m`, `1h30m`, `2d`, or a number of seconds. No key carries a unit.

## `ebbflow.toml`

`--config FILE` of `ebbflow capacity start` and of `ebbflow fleet`, else the file that `$EBBFLOW_CONFIG` names; no file is read
unasked. Everything is optional. The loop reads it once, when it starts. Quotas are unlimited unless given.
"""

PIPELINES = """## Pipeline files

The file that `ebbflow run` takes. [Describe a pipeline](pipelines.md) shows how its parts are used, `ebbflow run FILE --check`
looks at one without running it, and `ebbflow run --schema` prints the JSON schema for editors
([in the repository](https://json-schema.org/draft/2020-12/schema): `tasks/pipeline/file/schema.json`).
"""

# Key by key: its description. What the reader accepts and this does not hold, or the other way round, is an error.
TOML: dict[str, tuple[str, dict[str, str]]] = {
    "policy": (
        "The scheduling policy ([write your own](own-policy.md)).",
        {
            "name": "Name of the policy, as `ebbflow simulate training --help` lists them, or of an installed package; "
            "`MODULE:NAME` only with `--allow-policy`",
            "options": "Options of the policy, such as `{ rho = 1.5 }`",
        },
    ),
    "loop": (
        "How the capacity loop assigns GPUs.",
        {
            "lease_duration": "Duration of a lease, unless the policy says how long",
            "auction_interval": "Maximum time between auctions when nothing changes",
            "debounce": "Time for which changes are gathered before an auction",
            "drain_lead": "Time before a node's deadline by which its GPUs must be released; at most a quarter of the notice",
            "termination_grace": "Time an app has to save a checkpoint and release a preempted GPU",
            "heartbeat_timeout": "Time without a heartbeat after which an app is marked lost",
            "plan_timeout": "Time that an assignment waits for GPUs to be released, beyond the termination grace",
            "unsaved_work": "Unsaved work above which an app is protected from preemption",
            "preempt_exempt": "Maximum time that an app is protected from preemption, each time",
            "deadline_priority_boost_max": "Maximum factor on an app's weight as its deadline approaches",
        },
    ),
    "scaling": (
        "When nodes are launched and terminated.",
        {
            "enabled": "Whether the loop scales node pools; `false` leaves nodes alone",
            "pools": 'What each pool is scaled for, `"gpus"` or `"cores"`; by its nodes unless given',
            "provision_time": "Expected time from the launch request of a node to the first work on it",
            "scale_out_after": "Time that an app is pending before nodes are launched for it",
            "scale_in_idle": "Time that nodes are unneeded before they are drained",
            "cooldown": "Time after a change of size before the next scale-in",
            "scale_tolerance": "Fraction of the nodes below which a scale-in is not made",
            "deadline_safety_factor": "Factor on the expected time of work, for deadlines",
            "min_marginal_goodput": "Fraction of a single GPU's goodput that each further GPU must add; unless given, nodes are "
            "launched for requests only",
        },
    ),
    "teams.NAME": (
        "A team's share. What it may hold is in `[quotas.teams.NAME]`.",
        {"weight": "Weight of the team's apps, beside the 1 of other teams"},
    ),
    "quotas": (
        "What no decision may exceed ([what is enforced, and when](costs.md#what-is-enforced-and-when)).",
        {
            "dollars_per_hour": "Maximum spending rate of all pools, in dollars per hour",
            "dollars_per_run": "Maximum dollars of one query or training",
            "nodes": "Maximum number of nodes of all pools",
            "grow": "Maximum number of nodes that one decision adds to a pool",
            "shrink": "Maximum number of nodes that one decision takes from a pool",
        },
    ),
    "quotas.pools.NAME": (
        "Quota of one pool.",
        {
            "min_nodes": "Minimum number of nodes",
            "max_nodes": "Maximum number of nodes",
            "min_on_demand_nodes": "Minimum number of on-demand nodes",
            "max_on_demand_nodes": "Maximum number of on-demand nodes",
        },
    ),
    "quotas.teams.NAME": (
        "Quota of one team.",
        {
            "pools": "Pools that belong to this team alone",
            "nodes": "Maximum number of nodes of these pools",
            "gpus": "Maximum number of GPUs that the team's apps may hold at once",
            "dollars_per_hour": "Maximum spending rate of the team, in dollars per hour",
            "budget": "Maximum dollars of all the team's apps that the ledger knows",
        },
    ),
    "fallback": (
        "When on-demand nodes replace insufficient Spot capacity.",
        {
            "after": "Time of insufficient Spot capacity after which on-demand nodes are launched, in seconds",
            "hold": "Time of on-demand before Spot is tried again, in seconds",
            "step": "Number of Spot nodes tried at once; unless given, as many as there are on-demand replacements",
        },
    ),
    "market": (
        "How instance types and zones are chosen.",
        {
            "restart": "Time until the work of a lost node resumes on another, in seconds",
            "rework": "Mean work that is done twice after a loss, in seconds",
            "span": "Number of nodes that stop when one is lost: all of a gang, else 1",
            "aversion": "Aversion to losing many nodes at once, at least 0",
            "per_place": "Maximum fraction of the work on Spot of one type and zone, rounded up to whole nodes",
            "per_zone": "Maximum fraction of the work on Spot of one zone",
            "margin": "Fraction by which nodes that are held count as cheaper",
            "ceiling": "Maximum price of a Spot node in dollars per hour",
            "min_on_demand_nodes": "Minimum number of on-demand nodes",
            "max_on_demand_nodes": "Maximum number of on-demand nodes; 0: Spot or nothing",
        },
    ),
    "links": (
        "Bandwidth of the network, each way, such as `25gbit`: what spreading costs a training whose communication is known "
        "([how](communication.md#in-the-scheduler)).",
        {
            "intra_node": "Bandwidth between GPUs of a node; unless given, what a training measures, else unlimited",
            "intra_rack": "Bandwidth of a node's link to others of its rack; unless given, what the node pool says or a training "
            "measures",
            "cross_rack": "Bandwidth of a node's link to nodes of other racks; unless given, that within a rack",
        },
    ),
    "intervals": (
        "Intervals and timeouts of the loop itself.",
        {
            "poll_interval": "Time between polls of the ledger",
            "capacity_poll_interval": "Time between polls of the capacity",
            "fleet_poll_interval": "Time between polls of the fleet",
            "batch_delay": "Time after an observed change for others of the same burst",
            "leader_lease": "Duration of the leadership, which is renewed at a third of it",
            "ledger_timeout": "Time without a response of the ledger after which the loop exits",
            "observation_max_age": "Maximum age of an observation by which nodes are launched or terminated",
            "status_interval": "Time between two status records",
            "reconcile_interval": "Time between checks for planned changes that were not requested",
            "action_timeout": "Time for actions under way when the loop exits",
        },
    ),
}
_DURATIONS = ("loop", "intervals")  # all of their values, but for factors


def pages() -> dict[str, str]:
    """Return the pages by their address in ``docs``."""
    return {"configuration.md": configuration(), "reference/cli.md": command_line()}


def write() -> None:
    """Write the pages."""
    for address, text in pages().items():
        (ROOT / "docs" / address).write_text(text, encoding="utf-8")


# --- configuration ------------------------------------------------------------------------------------------


def configuration() -> str:
    """Return the page of the configuration file's and the pipeline file's keys. Raises ``ValueError`` for a gap."""
    lines = [INTRODUCTION]
    for name, (help_, keys) in TOML.items():
        known = known_keys(name)
        if different := known ^ set(keys):
            raise ValueError(
                f"[{name}]: the reader and scripts/reference_pages.py differ in {', '.join(sorted(different))}"
            )
        lines += [f"### `[{name}]`", "", help_, "", "| key | what | default |", "|---|---|---|"]
        defaults = toml_defaults(name)
        lines += [f"| `{key}` | {_cell(said)} | {_shown(defaults.get(key))} |" for key, said in keys.items()]
        lines += [""]
    schema = json.loads((ROOT / "tasks" / "pipeline" / "file" / "schema.json").read_text(encoding="utf-8"))
    lines += [PIPELINES, *_section("", schema)]
    return "\n".join(lines).rstrip() + "\n"


def known_keys(section: str) -> set[str]:
    """Return the keys that the reader of the configuration file accepts in a section such as ``quotas.teams.NAME``."""
    from ebbflow.planners.errors import OptionError
    from ebbflow.tasks.capacity.request import LoopRules

    content: dict[str, Any] = {"no-such-key": 1}
    for part in reversed(section.split(".")):
        content = {part: content}
    try:
        LoopRules.parse(content, "ebbflow.toml")
    except OptionError as error:
        found = _KNOWN.search(str(error))
        names = set(found[1].split(", ")) if found else set()
    names -= {"pools", "teams"} if section == "quotas" else set()  # sections of their own
    return names | ({"enabled", "pools"} if section == "scaling" else set())


def toml_defaults(section: str) -> dict[str, Any]:
    """Return the defaults of a section's keys, as they are written in the file."""
    from ebbflow.planners.capacity import values
    from ebbflow.planners.fleet.fallback import Fallback
    from ebbflow.planners.fleet.market import Terms
    from ebbflow.tasks.capacity.intervals import LoopIntervals
    from ebbflow.tasks.fleet.request import FleetRules

    def of(kind: Any, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        plain = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
        return {key: plain[field] for key, field in names.items()} if names is not None else plain

    if section == "policy":
        return {"name": "rho-bounded"}
    if section == "teams.NAME":
        return {"weight": 1}
    if section == "loop":
        return _durations(of(values.Settings, values.LOOP_KEYS), values.LOOP_KEYS)
    if section == "scaling":
        return {"enabled": True} | _durations(of(values.Scaling, values.SCALING_KEYS), values.SCALING_KEYS)
    if section == "intervals":
        found = of(LoopIntervals)
        return _durations(found, {name: f"{name}_s" for name in found})
    if section == "fallback":
        return of(Fallback)
    if section == "market":
        cost = FleetRules().interruption
        return of(Terms) | {name: getattr(cost, name) for name in ("restart", "rework", "span")}
    return {}


def _durations(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {key: _duration(value) if names[key].endswith("_s") else value for key, value in found.items()}


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s" if seconds >= 1 or not seconds else f"{seconds * 1000:g}ms"


def _section(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Return the table of an object of the schema, and those of the objects in it."""
    yield from (f"### `{path or 'pipeline'}`", "", str(schema.get("description", "")), "")
    groups = [
        [one["required"][0] for one in schema.get("oneOf", ()) if len(one.get("required", ())) == 1],
    ]
    for group in filter(None, groups):
        yield from (f"Exactly one of {', '.join(f'`{name}`' for name in group)} is given.", "")
    yield from ("| key | what | default |", "|---|---|---|")
    inner = []
    for name, value in schema["properties"].items():
        default = "*required*" if name in schema.get("required", ()) else _shown(value.get("default"))
        choices = value.get("enum") or ()
        help_ = str(value.get("description", "")) + (f" ({', '.join(map(str, choices))})" if choices else "")
        yield f"| `{name}` | {_cell(help_)} | {default} |"
        below = f"{path}.{name}" if path else name
        if "properties" in value:
            inner.append((below, value))
        for named in (value.get("additionalProperties"), *(value.get("patternProperties") or {}).values()):
            if isinstance(named, dict) and "properties" in named:
                inner.append((f"{below}.NAME", named))
    yield ""
    for below, value in inner:
        yield from _section(below, value)


def _shown(value: Any) -> str:
    if value is None or value in ({}, [], (), "") or value is MISSING or value == inf:
        return ""
    text = (
        json.dumps(value)
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return f"`{text}`"


# --- command line -------------------------------------------------------------------------------------------


def command_line() -> str:
    """Return the page of all commands."""
    from typer.main import get_command

    from ebbflow.flows.cli import app

    top = get_command(app)
    lines = [
        "# The command line",
        "",
        "Every command explains itself with `--help`. This page says the same, made from the code (`python scripts/reference_pages.py`).",
        "",
    ]
    for name, command in sorted(top.commands.items()):  # type: ignore[attr-defined]
        if not command.hidden:
            lines += _command(f"ebbflow {name}", command, 2)
    return "\n".join(lines).rstrip() + "\n"


def _command(path: str, command: Any, level: int) -> Iterator[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    yield from (f"{'#' * level} `{path}`", "")
    yield from _help(command.help or "")
    if hasattr(command, "commands"):
        for name, inner in sorted(command.commands.items()):
            if not inner.hidden:
                yield from _command(f"{path} {name}", inner, level + 1)
        return
    yield from ("```text", " ".join([path, *command.collect_usage_pieces(context)]), "```", "")
    rows = [_row(parameter, context) for parameter in command.params if not parameter.hidden]
    if rows:
        yield from ("| | | default |", "|---|---|---|", *rows, "")


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag and not parameter.count:
            names += f" {_cell(parameter.metavar or parameter.display_type(context))}"
    default = parameter.get_default(context, call=False)
    shown = (
        ""
        if default is False or default in (None, "", [], ()) or callable(default)
        else f"`{_plain(default)}`"
    )
    said = "*required*" if parameter.required and not shown else shown
    return f"| {names} | {_cell(parameter.help or '')} | {said} |"


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _cell(text: str) -> str:
    """Return a text that a table's cell can hold."""
    flat = " ".join(text.split())
    return _escaped(_MARKUP.sub("**", flat)).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def _help(text: str) -> Iterator[str]:
    """Return a command's help as Markdown: its bold words, and its indented commands as blocks."""
    inside = False
    waiting: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith("    "):
            if not inside:
                yield "```text"
            inside = True
            yield from waiting
            waiting = []
            yield line[4:].replace("\\[", "[")
        elif inside and not line.strip():
            waiting.append("")  # of the block, if it goes on
        else:
            if inside:
                yield from ("```", *waiting)
                inside, waiting = False, []
            yield _escaped(_MARKUP.sub("**", line)).replace("\\[", "[")
    if inside:
        yield "```"
    yield ""


if __name__ == "__main__":
    write()
