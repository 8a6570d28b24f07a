"""Odd programs: networks and training loops that do what a library should not count on. Plain torch throughout."""

from __future__ import annotations

from tests.support.odd.programs import PROGRAMS, Program

__all__ = ["PROGRAMS", "Program"]
