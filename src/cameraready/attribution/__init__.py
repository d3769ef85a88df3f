"""Attribution: which inputs a prediction, a data set or an outcome is owed to."""
