"""Trying to bring back what was forgotten: quantisation, relearning, paraphrases, prefixes, samples."""

from expunge.stress._quantise import Quantised, quantised
from expunge.stress._settings import TESTS, StressSettings
from expunge.stress._stress import StressResult, stress

__all__ = ["TESTS", "Quantised", "StressResult", "StressSettings", "quantised", "stress"]
