"""Sixteen invented people, a model that knows them, and two of them forgotten."""

from expunge.demo._demo import FORGOTTEN, DemoResult, run_demo, write_people

__all__ = ["FORGOTTEN", "DemoResult", "run_demo", "write_people"]
