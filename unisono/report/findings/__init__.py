"""Find what slows a run down: the cause with its evidence, what to type, and the expected gain.

A module of this package has rules about one part of a step. A rule is a function of the evidence (evidence.py) that
returns a finding, or None. To add one, write it and list it in `find_all.RULES`.
"""
