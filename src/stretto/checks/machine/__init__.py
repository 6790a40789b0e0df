"""Checks of the machine before anything starts there, one function each; `stretto.checks.doctor` lists them.

A check is handed facts (`base.Setting`) and answers with a sentence. Facts are gathered once, in `machine`. No torch.
"""
