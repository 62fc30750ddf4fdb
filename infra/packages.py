"""Packages that only some parts need, and what to say where one is missing."""

from importlib.util import find_spec

from ebbflow.infra.errors import EngineUnavailableError


def require(module: str, purpose: str, extra: str = "") -> None:
    """Raise ``EngineUnavailableError`` with what to install, unless ``module`` can be imported.

    Args:
        module: as it is imported.
        purpose: what needs it, as a sentence begins.
        extra: of this package, which brings it; none does unless given.
    """
    if find_spec(module) is None:
        what = f"'prefect-ebbflow[{extra}]'" if extra else module
        raise EngineUnavailableError(f"{purpose} needs {module}: pip install {what}")
