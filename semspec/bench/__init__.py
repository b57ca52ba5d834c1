"""Speed beside quality: run methods on a task, compare them, report. See run.py for what a run is."""
