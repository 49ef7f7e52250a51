"""What runs and when: the Prefect flows, their deployments, the `convoy` command."""
