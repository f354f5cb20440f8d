"""Measurements: timing, named cases, peers, one script per question, and the report.  Run from the repository root."""
