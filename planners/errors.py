"""The root of Ebbflow's errors, and what planning can refuse.

EbbflowError
├── PlanningError
│   ├── SqlSyntaxError          the text does not parse; position and piece are shown
│   ├── UnknownTableError       a table that the catalogue lacks
│   ├── UnknownColumnError      a column that no table in scope has
│   ├── UnsupportedQueryError   not a query, more than one statement, or one that is too long or too deep
│   └── ForbiddenSqlError       a query that reaches beyond its tables: files, network, settings, code
├── OptionError                 an option outside its rule
│   └── PipelineFileError       a pipeline's file; file, line, value and rule are named
└── InfraError                  (``ebbflow.infra.errors``)
"""


class EbbflowError(Exception):
    """Base of every error that Ebbflow raises on purpose.

    ``str(error)`` names the offending value and the rule, or says what to do.
    """


class PlanningError(EbbflowError):
    """A query that cannot be planned as it stands."""


class SqlSyntaxError(PlanningError):
    """SQL text that does not parse."""


class UnknownTableError(PlanningError):
    """A table that is in neither the catalogue nor the query."""


class UnknownColumnError(PlanningError):
    """A column that no table in scope has."""


class UnsupportedQueryError(PlanningError):
    """Text that is not exactly one query, or one that is too long or too deep."""


class ForbiddenSqlError(PlanningError):
    """A query that reaches beyond its tables by a function or a clause that nobody has allowed."""


class OptionError(EbbflowError):
    """An option whose value breaks its rule."""


class PipelineFileError(OptionError):
    """A pipeline's file that breaks the format; the message names file, line, value and rule, a line for each."""
