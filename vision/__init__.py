"""Images: opening and resizing them, encoding them, and projecting them to the language model's width."""
