"""Step times on links that are not there: a model of traffic, and a clock for ranks that wait for each other."""

from lightning_distlab.simulation.clock import Schedule, step_seconds
from lightning_distlab.simulation.links import PROFILES, parse_link
from lightning_distlab.simulation.traffic import Traffic, critical_bytes, traffic_of

__all__ = ["PROFILES", "Schedule", "Traffic", "critical_bytes", "parse_link", "step_seconds", "traffic_of"]
