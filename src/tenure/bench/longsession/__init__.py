"""``tenure bench longsession``: what a session still knows after a long stretch of other text.

Three definitions, filler that never repeats, three tasks that need the definitions. Each arm is a setting of the same
code; hidden unit tests decide. The recipe follows what is public of PACE's experiments; wording, names and tests are
our own.
"""
