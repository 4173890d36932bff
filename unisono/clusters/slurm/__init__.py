"""Write batch scripts for Slurm, and submit them."""
