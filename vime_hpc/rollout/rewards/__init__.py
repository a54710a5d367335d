"""Verifiers: from a response to a reward.

A built-in verifier is an ordinary function of (sample, prompt, table) that returns {"score": float,
"pred": what it read as the answer, ...}; an exception makes the reward unusable, never 0.
"""
