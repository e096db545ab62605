"""Reads model files: safetensors and GGUF."""
