"""From logits to tokens: processing, drawing, and noise without a generator."""
