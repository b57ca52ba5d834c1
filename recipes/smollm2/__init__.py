"""A draft model for SmolLM2, or for any Llama-like checkpoint: a few of its layers, distilled on its own samples."""
