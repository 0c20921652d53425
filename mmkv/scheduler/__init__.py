"""One scheduler for all requests of an engine (docs/how-it-works/scheduler.md); needs no torch."""

from __future__ import annotations

from mmkv.scheduler.capacity import PersistentSession, Reservation
from mmkv.scheduler.contract import Executor, Job
from mmkv.scheduler.loop import Limits, Scheduler, Ticket

__all__ = ["Executor", "Job", "Limits", "PersistentSession", "Reservation", "Scheduler", "Ticket"]
