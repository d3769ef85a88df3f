"""Statistics: regression and inference with honest uncertainty.

You want a number with an error bar that means something: a function through scattered measurements, on a handful of points or
on millions; many short series that share a pattern; an order, a change, an error to expect. The methods of this room are exact
where they say so, and say where they are not.
"""
