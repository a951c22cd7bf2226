"""The scripts of this folder are run, not collected: they import each other by their bare names."""

collect_ignore = ["compare.py", "fixtures.py", "interface.py", "journeys.py", "record.py"]
