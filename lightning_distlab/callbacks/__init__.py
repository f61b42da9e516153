"""Callbacks for any Trainer."""

from lightning_distlab.callbacks.comm_summary import CommSummary

__all__ = ["CommSummary"]
