"""Jagged inputs: length profiles (declared, exact by seed) and the lengths found in interaction logs."""
