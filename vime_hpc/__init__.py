"""Reinforcement-learning post-training of language models as one Slurm job, without Ray."""

__version__ = "0.1.0"
