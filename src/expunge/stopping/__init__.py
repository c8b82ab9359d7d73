"""When to stop: an online rule that reads training-time quantities only. No model, no clock, no file."""

from expunge.stopping._rule import Decision, Observation, StoppingRule, left_over, sampling_error

__all__ = ["Decision", "Observation", "StoppingRule", "left_over", "sampling_error"]
