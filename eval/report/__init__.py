"""Results to something people read."""

from __future__ import annotations

from eval.report.markdown import render, write_report

__all__ = ["render", "write_report"]
