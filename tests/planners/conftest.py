"""Property tests judge results, never how busy the machine is: no deadline per example."""

from hypothesis import settings

settings.register_profile("ebbflow", deadline=None)
settings.load_profile("ebbflow")
