"""What a policy must be asked again with, because the guard would not let its answer pass."""

from dataclasses import dataclass, field

from ebbflow.planners.model.scheduling import Placement


@dataclass(slots=True)
class Terms:
    """What a policy must be asked again with."""

    refused: dict[str, str] = field(default_factory=dict)  # apps that get nothing
    capped: dict[str, tuple[int, str]] = field(default_factory=dict)  # apps that get so many GPUs at most
    spared: dict[str, tuple[Placement, str]] = field(default_factory=dict)  # apps that keep what they have

    def merge(self, other: "Terms") -> bool:
        """Take over ``other``; tell whether anything is new."""
        before = (dict(self.refused), dict(self.capped), dict(self.spared))
        self.refused |= other.refused
        for app, (most, why) in other.capped.items():
            if app not in self.capped or most < self.capped[app][0]:
                self.capped[app] = (most, why)
        self.spared |= other.spared
        for app in self.refused:
            self.capped.pop(app, None)
            self.spared.pop(app, None)
        return before != (self.refused, self.capped, self.spared)
