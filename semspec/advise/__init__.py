"""Whether speculation pays for a pair on given prompts and this machine, and with which settings."""
