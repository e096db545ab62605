"""From options to an engine that is ready."""
