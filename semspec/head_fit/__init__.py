"""Training draft heads: the target's own texts, the head, its training, and what is published of it."""
