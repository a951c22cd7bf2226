"""Benchmarks of encoders, training steps and indexes in comparison with other libraries, with one common harness.

`quiver.eval.bench.encoder`, `quiver.eval.bench.training` and `quiver.eval.bench.index` are the three subjects. Each defines its cases, the
backends that can run them, a measurement, and the tables of its report. Everything else is shared: child processes, interleaved rounds,
results, reports.
"""
