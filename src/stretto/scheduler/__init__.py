"""What happens when in a step: a state machine without I/O, for the real world and for a simulated one."""
