"""What the study of paced selection runs: policies on an enumerable task whose accuracies are exact, many seeds at once."""
