"""Where the recipes' data is from, a file for each. It says in one line what was taken, its size and its licence."""
