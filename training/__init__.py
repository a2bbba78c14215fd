"""What the two loops share: the frame around their iterations, the optimizer, and steps that must not be taken."""
