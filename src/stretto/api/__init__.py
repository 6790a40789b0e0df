"""What Python programs call: `stretto.train` and the others. The command line is a thin layer over it."""
