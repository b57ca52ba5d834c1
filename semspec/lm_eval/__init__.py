"""lm-evaluation-harness over a pair: `semspec-lm-eval --model semspec --model_args target=...,verifier=...`.

The harness finds models in its own registry only (0.4.13 looks for no entry points), so the command registers ours and
hands everything to the harness's command line.
`model.py` needs the extra `semspec[lm_eval]`; bench's task `lm_eval` (tasks/harness.py) does, too.
"""
