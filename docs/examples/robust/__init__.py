"""Robust: estimates that a few wrong measurements cannot spoil.

Some of your measurements are wrong, you do not know which, and a mean follows them anywhere. The methods of this room
give up a little precision on clean data for estimates that stay where the bulk of the data is.
"""
