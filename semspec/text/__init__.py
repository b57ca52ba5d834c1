"""Between tokens and text: tokenizers, streaming, and where a reasoning step ends."""
