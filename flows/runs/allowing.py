"""The option by which whoever runs SQL lets it call functions that reach beyond its tables."""

from typing import Annotated

import typer

AllowFunctions = Annotated[
    list[str] | None,
    typer.Option(
        help="Functions that the SQL may call though they read files, a network or settings or run code, such as "
        "read_csv; by commas. Repeatable.",
        metavar="NAME[,NAME...]",
    ),
]
