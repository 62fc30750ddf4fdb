"""What a step's processes find in their environment. Nothing here is ever written down."""

from collections.abc import Mapping

from ebbflow.tasks.pipeline.coordinator import Attempt
from ebbflow.tasks.pipeline.file.references import Reference, fill_in
from ebbflow.tasks.pipeline.site import from_environment


def environment_of(attempt: Attempt) -> Mapping[str, str]:
    """Return the environment that a step asks for, on top of its processes' own. Raises ``OptionError``."""

    def value(reference: Reference) -> str:
        return from_environment(reference) if reference.of == "env" else attempt.fill(str(reference))

    return {name: fill_in(text, value) for name, text in attempt.step.environment.items()}
