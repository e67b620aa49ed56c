"""Measures a grader before anyone trains on its verdicts: is it steady, does it see flaws, can it be swayed.

`flaws` spoils a correct patch, `planted` makes groups of the results, `attacks` adds text meant for the
grader, `audit` asks the grader and counts.
"""
