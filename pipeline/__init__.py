"""The stages as plain functions `Config -> Result`, their configuration, the workspace, DVC."""
