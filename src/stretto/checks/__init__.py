"""What is wrong with a recipe or a machine, found before anything heavy starts."""
