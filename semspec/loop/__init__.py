"""The decoding loop: propose, score, verify, commit; one generator a sequence, one executor for all."""
