"""Training: the run and its verbs, the step and its contract, the state that a resume needs."""
