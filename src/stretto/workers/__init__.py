"""What a plan is executed with: processes, the checks before they start, and who watches them. It decides nothing."""
