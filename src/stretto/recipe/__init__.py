"""The recipe: its keys, how it is read, and what it means in words."""
