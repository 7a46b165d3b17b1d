"""The study's laboratory: one run of one arm in one process, on one thread, without a server.

persona.py   who the user is: its problems, its rule, what it says
arms.py      what is compared: recipe and training settings of each arm
sampler.py   the embedded engine's forward pass and sampling, driven directly
learner.py   verdicts to steps: the recipe and the trainer, called directly
run.py       sessions side by side, round after round; a run stops and goes on anywhere
results.py   rows of CSV, and the numbers they add up to
page.py      figures and the written page, from the rows alone
"""
