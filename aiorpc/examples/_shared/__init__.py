"""What the example programs have in common: starting workers, command lines, progress, pictures, models, games."""
