"""What stages cost in time and memory: formulas, without measuring anything."""
