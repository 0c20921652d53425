"""Real servers on the loopback: their speed, and what they do when clients misbehave."""
