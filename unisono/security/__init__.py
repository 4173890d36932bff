"""Who may read the files of a run, which texts are secrets, and a record that shows every change."""
