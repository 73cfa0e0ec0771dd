"""`hurtle bench serve`: a client that loads a server, and measures how many requests it answers and how fast."""
