"""The models that are trained, and what trains them."""

import logging

# PEFT imports bitsandbytes where it is installed, which then tells everybody of kernels that nobody asked for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
