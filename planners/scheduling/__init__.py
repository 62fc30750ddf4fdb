"""GPU scheduling policies, one a file, behind one protocol (ebbflow.planners.model.scheduling)."""
