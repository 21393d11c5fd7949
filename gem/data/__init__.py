"""Jagged inputs: length profiles, interaction logs, training samples on disk and from a teacher, readers."""
