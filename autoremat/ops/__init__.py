"""Facts about ops: their traits, their work, and the declarations of users."""
