"""Reading optimized HLO text, its collectives, and how they are overlapped. Pure: no jax.

``parse`` reads the text, ``collectives`` counts what it moves, ``audit`` judges the schedule.
"""
