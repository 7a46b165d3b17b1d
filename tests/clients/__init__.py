"""Real, unmodified clients against the gateway, each compared with the same client at the engine itself.

A client is a function of a base URL that plays the story and returns what it heard: each reply, and a
line that begins with "tool" for each call it was asked to make.
"""
