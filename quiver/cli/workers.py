"""The options of commands whose work can be done by several workers."""

from __future__ import annotations

import typer

ExecutorOption = typer.Option("--executor", help="Who encodes: local (this machine) or ray (a cluster).")
WorkersOption = typer.Option("--workers", min=1, help="How many at once; by default this process alone, or all of a cluster.")
AddressOption = typer.Option("--address", help="Of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto; by default one on this machine.")
ThreadsOption = typer.Option("--threads", min=1, help="Threads of each worker; by default this machine's, shared out.")
