"""Causes: effects to act on, and the structure behind what was measured.

You ask what would happen if you acted: whom a treatment helps most, which hidden variables drive the measured ones, what leads to
what. The methods of this room say what they assume, test what can be tested of it, and give every answer an error bar, or the
answer that the data cannot tell.
"""
