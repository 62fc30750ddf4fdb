"""Setting Ebbflow up: what is installed, benchmark data, deployments, the demo."""
