"""Pages of the documentation site that are made from the code when it is built: mkdocs calls ``on_files``.

``reference/cli.md`` comes from the command line itself, ``reference/pipeline.md`` from the format of pipeline files;
``changes.md`` and ``reference/terraform.md`` are pages that live elsewhere in the repository.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)[^)\s]+\)")  # to a file of the repository
_MARKUP = re.compile(r"\[(/?)b\]")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here; called by mkdocs."""
    from mkdocs.structure.files import File

    for address, text in pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the made pages by address."""
    return {
        "reference/cli.md": command_line(),
        "reference/pipeline.md": pipeline_file(),
        "changes.md": moved(ROOT / "CHANGELOG.md"),
        "reference/terraform.md": moved(ROOT / "terraform" / "README.md"),
    }


def moved(path: Path) -> str:
    """Return a page of the repository for the site: its links to files become their names."""
    return _LINK.sub(r"`\1`", path.read_text(encoding="utf-8"))


def pipeline_file() -> str:
    """Return the page of the sections and keys of a pipeline's file."""
    from ebbflow.tasks.pipeline.file import form, steps

    lines = [
        "# Pipeline files",
        "",
        "Sections and keys of the YAML file that `ebbflow run` takes, made from the code that reads it. "
        "[Describe a pipeline](../pipelines.md) shows how they are used.",
        "",
        form.PIPELINE.help,
        "",
        *_keys(form.PIPELINE),
    ]
    sections = {
        "cluster": form.CLUSTER,
        "cluster.local": form.LOCAL,
        "cluster.local.pools.NAME": form.POOL,
        "cluster.aws": form.AWS,
        "cluster.existing": form.EXISTING,
        "teams.NAME": form.TEAM,
        "queries.NAME": steps.QUERY,
        "trainings.NAME": steps.TRAINING,
        "tunings.NAME": steps.TUNING,
        "loop": form.LOOP,
        "loop.scaling": form.SCALING,
        "quotas": form.QUOTAS,
    }
    for name, section in sections.items():
        lines += [f"## `{name}`", "", section.help, "", *_keys(section)]
    return "\n".join(lines)


def _keys(section: Any) -> Iterator[str]:
    from ebbflow.tasks.pipeline.file.sections import shown_default

    for group in section.one_of:
        yield from (f"Exactly one of {', '.join(f'`{name}`' for name in group)} is given.", "")
    yield from ("| key | what | default |", "|---|---|---|")
    for key in section.keys:
        said, _, otherwise = key.help.partition(". Default: ")  # a default in words
        default = shown_default(key.default)
        shown = "*required*" if key.required else otherwise or (default and f"`{default}`")
        choices = getattr(key.kind, "choices", ())
        help_ = said + (f" ({', '.join(choices)})" if choices else "")
        yield f"| `{key.name}` | {_cell(help_)} | {shown} |"
    yield ""


def command_line() -> str:
    """Return the page of all commands."""
    from typer.main import get_command

    from ebbflow.flows.cli import app

    top = get_command(app)
    lines = [
        "# The command line",
        "",
        "Every command explains itself with `--help`; this page says the same, made from the code.",
        "",
    ]
    for name, command in sorted(top.commands.items()):  # type: ignore[attr-defined]
        if not command.hidden:
            lines += _command(f"ebbflow {name}", command, 2)
    return "\n".join(lines)


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
