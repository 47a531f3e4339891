"""Training of tri-mode models: corruption, dual stream, objective, loop and the recipe of the shipped nano model."""
