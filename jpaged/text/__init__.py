"""From text to token ids and back. Imports no JAX."""
