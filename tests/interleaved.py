"""Closed forms that the planner does not need, to compare its simulation with: roles side by side on halves."""


def interleave_frozen(at, exchange=0.0):
    """I1: `reference` and `reward` are the times on half of the devices, all others on all of them."""
    frozen = max(at.reference, at.reward) + exchange
    return at.generate + at.old + at.value + frozen + at.train + at.fit + at.publish + 2 * at.switch


def interleave_pairs(at):
    """I2: actor and reference on one half of the devices, critic and reward model on the other."""
    forwards = max(at.old + at.reference, at.value + at.reward)
    return at.generate + forwards + max(at.train, at.fit) + at.publish + 2 * at.switch
