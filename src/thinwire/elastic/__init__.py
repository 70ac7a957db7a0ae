"""Elastic rounds: ranks leave and join while a run goes on."""
