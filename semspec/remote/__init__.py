"""Two OpenAI-compatible servers as a pair: one writes reasoning steps, the other scores them. Text is exchanged.

Nothing is known of the models but what their servers report: the text of tokens, their log-probabilities and those of
the likeliest others. That is enough for step rules: `verification.py` lays it out as the rows that a rule of this
package gets from a model in this process, so there is one implementation of each rule.
"""
