"""``tenure bench speed --peers``: the same agent session in Tenure and in the engines people would compare it with.

Each peer runs in a process of its own, in an environment of its own where it needs one, on two threads. Turns go round:
every peer does turn 1, then every peer turn 2, so that a slow minute of the machine hits all of them. Each turn reads the
same new tokens and writes the same number; a peer's history holds its own answers.
"""
