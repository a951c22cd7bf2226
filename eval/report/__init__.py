"""Results to something people read."""

from __future__ import annotations

from quiver.eval.report.writing import write_paper, write_report

__all__ = ["write_paper", "write_report"]
