"""Each stage as a Prefect task: retries, timeouts, and artifacts for the UI."""
