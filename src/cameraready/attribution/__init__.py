"""Attribution: which inputs a prediction, a data set or an outcome is owed to.

You have a model and a prediction, and somebody asks why. Or you have players, sources or training points, and want to
share an outcome among them fairly. The methods of this room answer with numbers that add up, from as few calls of the
model as they can, and say how far the numbers can be trusted.
"""
