"""An OpenAI-compatible server: one thread decodes, everything else is HTTP."""
