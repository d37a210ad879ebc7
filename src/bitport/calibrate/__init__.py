"""Running a model on example inputs to learn what its layers see."""
