"""Verdicts, tables, figures and pages made from evidence."""
